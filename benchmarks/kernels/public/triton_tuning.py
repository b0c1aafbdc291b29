"""Triton's autotuner compiles one configuration after another; here all of them at once, before."""

import contextlib
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor


@contextlib.contextmanager
def compiling_at_once() -> Iterator[None]:
    """Inside, what an autotuner is to try is compiled in threads: seconds instead of minutes.

    A configuration that does not compile is left to the autotuner, which passes it over.
    """
    from triton.runtime import autotuner

    run, tuned = autotuner.Autotuner.run, set()

    def run_compiled(self, *args, **kwargs):
        named = dict(zip(self.arg_names, args, strict=False)) | kwargs
        about = self, *(str(named.get(name)) for name in self.keys)  # what it tries them anew for
        if len(self.configs) > 1 and about not in tuned:
            tuned.add(about)
            options = {**kwargs, "grid": (1,), "warmup": True}

            def compiled(config):
                with contextlib.suppress(Exception):
                    self.fn.run(*args, **{**options, **config.all_kwargs()})

            with ThreadPoolExecutor() as threads:
                list(threads.map(compiled, self.configs))
            print(f"{self.base_fn.__name__}: {len(self.configs)} configurations", file=sys.stderr)
        return run(self, *args, **kwargs)

    autotuner.Autotuner.run = run_compiled
    try:
        yield
    finally:
        autotuner.Autotuner.run = run
