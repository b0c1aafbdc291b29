"""A server in a process of its own."""

import os
import re
import subprocess
import sys
import threading
import time


class Process:
    """A server in a process; `root` is known once its port is open."""

    def __init__(self, *words):
        path = os.pathsep.join([os.getcwd(), "tests/support"])
        env = {**os.environ, "PYTHONPATH": path, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, *words], stderr=subprocess.PIPE, text=True, env=env
        )
        self.lines = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.process.stderr:
            self.lines.append(line)

    def wait_for(self, pattern, seconds=240):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if found := re.search(pattern, "".join(self.lines)):
                return found.group(found.re.groups)
            if self.process.poll() is not None:
                break
            time.sleep(0.02)
        raise AssertionError(f"no {pattern}: {''.join(self.lines)}")

    def __enter__(self):
        try:
            self.root = self.wait_for(r"Serving at (http://127.0.0.1:\d+)")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error):
        self.process.kill()
        self.process.wait()
        self._reader.join(5)
        self.process.stderr.close()
