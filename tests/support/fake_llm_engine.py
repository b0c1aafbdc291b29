"""What AsyncLLM stands on, over a device in NumPy that checks each plan; prompts are `Ask`s."""

import itertools
import time

from callers import Ask, Letters
from fake_weights import FakeRollouts
from schedules import Schedule

from jaxspec.engine.metrics import EngineSnapshot, kv_cache_usage, metrics_of
from jaxspec.requests.outputs import Sample
from jaxspec.requests.request import Request
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.requests.stop_strings import StopStrings


class FakeLLMEngine(FakeRollouts):
    """An `LLMEngine` whose prompts are the numbers of `asks`, as texts."""

    tokenizer, model_name = None, "fake"

    def __init__(self, model=None, **options):
        del model
        self.schedule = Schedule(**options)
        super().__init__(self.schedule.session, self.schedule.runner)
        scheduler = self.schedule.scheduler
        self.shapes, self.limits = scheduler.shapes, scheduler.limits
        self.inputs = self  # an `InputProcessor`, too
        self.asks: dict[str, Ask] = {}
        self.before_prepare = lambda: None
        self._numbers, self._keys = itertools.count(), itertools.count(1)
        runner, dispatch = self.schedule.runner, self.schedule.runner.dispatch

        def take_time(plan):
            time.sleep(
                0.001
            )  # as a device would: or a quick machine has served all before others come
            return dispatch(plan)

        runner.dispatch = take_time

    def ask(self, ask: Ask) -> str:
        """The prompt that stands for `ask`."""
        name = str(next(self._numbers))
        self.asks[name] = ask
        return name

    def forget(self):
        """Let go of all requests, which have ended."""
        schedule = self.schedule
        for held in (self.asks, schedule.requests, schedule.device.log, schedule.device.admitted):
            held.clear()
        schedule.scheduler.planned = None

    def process_one(self, prompt, params, request_id, priority):
        self.before_prepare()
        if prompt not in self.asks:
            raise ValueError(f"{prompt!r} is no prompt")
        params = params or SamplingParams()
        requests = self.asks[prompt].requests(first_key=0)
        for index, request in enumerate(requests):
            request.params.output_kind = params.output_kind
            request.priority, request.index = priority, index
            request.request_id = request_id or prompt
        return [sample_of(request) for request in requests]

    def prepare_one(self, prompt, params=None, request_id=None, priority=0):
        samples = self.process_one(prompt, params, request_id, priority)
        self.admit(samples)
        return samples

    def admit(self, samples):
        self.session.gate.check_admits()
        for request in (sample.request for sample in samples):
            request.proposer_key = next(self._keys)
            self.schedule.requests[request.proposer_key] = request
        self.session.check(samples)

    def warm_up(self, feature_sets):
        pass

    num_running = property(lambda self: len(self.session.scheduler.running))
    kv_cache_usage = property(lambda self: kv_cache_usage(self.session.scheduler))

    def metrics(self):
        return self.session.engine.stats()

    def get_metrics(self):
        return metrics_of(self.session.engine, self.model_name)

    def snapshot(self):
        now = {"num_running": self.num_running, "kv_cache_usage": self.kv_cache_usage}
        return EngineSnapshot({**self.metrics(), **now}, self.get_metrics())

    def close(self):
        self.session.close()


def sample_of(request: Request) -> Sample:
    """A sample with letters for text."""
    stops = request.params.stop
    return Sample(request, Letters(), StopStrings(stops) if stops else None)
