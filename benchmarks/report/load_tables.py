"""Tables of loads: traffic, the server, cached prefixes, and jaxspec beside vLLM."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from benchmarks.measure.model_shapes import SHAPES
from benchmarks.report.table import COMMIT, Figures, Table, plural, results, size_of, spread

ROWS, DRAFTS, RATES = 64, 3, [0.80, 0.60, 0.45]  # named by the text instead of the tables
KINDS = ["idle", "prompts", "prompts and decode", "decode"]  # of steps
TRAFFIC = "traffic_h*.json"  # one per card
SERVING = "serving_h*.json"  # likewise, and optional
PEER = "decode_h200.json", "peer_h200.json"
PEER_TRAFFIC = "traffic_peer_h200.json"
PREFIXES, AGENTS = "prefixes_h200.json", "prefixes_h100.json"
Rows = Iterator[Figures]

# Traffic, from a file per card


def traffic(*cards: Figures) -> Rows:
    for card, case in by_load(cards):
        shares = {kind: case["shares_of_time"].get(kind, 0) for kind in KINDS}
        needed = {
            f"{what}_needed": case[f"{what}_real"] / case[f"{what}_computed"]
            for what in ("prompt_tokens", "rows")
        }
        yield case | _traffic_load(card, case) | shares | needed


def by_load(cards: Sequence[Figures]) -> list[tuple[str, Figures]]:
    """Return each result with its card: loads of a model from light to heavy, cards adjacent."""
    found = [(card_of(figures), case) for figures in cards for case in figures["results"]]
    return sorted(found, key=_order)


def card_of(figures: Figures) -> str:
    """Return the short name of the card of a file: "H100"."""
    return figures["device"].removeprefix("NVIDIA ").split()[0]


def work_of(case: Figures) -> str:
    """Return the model and the lengths of requests: "9B, trace"."""
    words = [size_of(case["shape"])]
    if case["drafts"] != DRAFTS:
        words.append(f"{case['drafts']} drafts")
    if case["rates"] != RATES[: case["drafts"]]:
        words.append(f"drafts accepted at {'/'.join(f'{rate:.0%}' for rate in case['rates'])}")
    if case.get("sampling", "greedy") != "greedy":
        words.append(case["sampling"])
    return ", ".join([*words, case["lengths"]])


def options_of(case: Figures) -> list[str]:
    """Return the options given by hand, without `max_num_seqs`."""
    vocab = {} if case["draft_vocab"] is None else {"draft_vocab": case["draft_vocab"]}
    return [f"{name}={value!r}" for name, value in (vocab | case["options"]).items()]


def is_all_at_once(case: Figures) -> bool:
    return case["at_once"] == case["requests"]


def _traffic_load(card: str, case: Figures) -> Figures:
    if is_all_at_once(case):
        load = f"all {case['requests']} at once"
    elif case["share"] is None:
        load = f"{case['at_once']} at a time"
    else:
        load = f"{case['arrivals_per_second']:.1f} a second ({case['share']:.0%})"
    rows = [f"max_num_seqs={case['rows']}"] if case["rows"] != ROWS else []
    by_hand = ", ".join(f"`{option}`" for option in rows + options_of(case)) or "defaults"
    return {"load": f"{work_of(case)}, {load}", "by_hand": by_hand, "card": card}


def _order(result: tuple[str, Figures]) -> tuple[Any, ...]:
    card, case = result
    is_trace = case["lengths"] == "trace"
    lengths = [] if is_trace else [int(number) for number in case["lengths"].split("x")]
    work = list(SHAPES).index(case["shape"]), -case["drafts"], case["rates"], lengths
    work = *work, case["sampling"] != "greedy"
    load = is_all_at_once(case), case["share"] is not None, case["at_once"] or case["share"]
    return *work, *load, case["rows"], options_of(case), card


# The server and cached prefixes: a function per part of their files


def serving(part: str) -> Callable[..., Rows]:
    def rows(*files: Figures) -> Rows:
        for case in results(*files):
            if case["part"] == part:
                yield case | _serving_load(case)

    return rows


def _serving_load(case: Figures) -> Figures:
    options = [f"max_num_seqs={case['rows']}", *options_of(case)]
    if case.get("switch_ms") is not None:
        options.append(f"sys.setswitchinterval({case['switch_ms'] / 1000:g})")
    if case.get("api_processes", 1) > 1:
        options.append(f"--api-processes {case['api_processes']}")
    load = f"{work_of(case)}, {case['at_once']} at a time"
    return {"load": load, "by_hand": ", ".join(f"`{option}`" for option in options)}


def prefixes(*parts: str) -> Callable[..., Rows]:
    def rows(figures: Figures) -> Rows:
        for case in results(figures):
            if case["part"] in parts:
                yield case | {
                    "tokens_each": case.get("prompt_tokens", 0) / case.get("requests", 1),
                    "megabytes": case.get("bytes_moved", 0) / 1e6,
                }

    return rows


# jaxspec beside vLLM

# Cases of decode_h200.json: shape, rows, dtype of recurrent states, steps per dispatch.
CASES = [
    *(("qwen3.5-0.8b", rows, "float32", 16) for rows in (1, 8, 64)),
    ("qwen3.5-9b", 1, "float32", 8),
    ("qwen3.5-9b", 8, "float32", 8),
    ("qwen3.5-9b", 64, "float16", 8),
]


class Load(NamedTuple):
    """Requests that both engines were sent at once, and the keys of vLLM's file and of ours."""

    lengths: str
    requests: int
    words: str
    part: str
    key: str
    our_key: str
    unit: str
    form: str


MS = "ms per token", ".2f"
SPEED = "tokens per second", ",.0f"
EQUAL = Load("512x256", 64, "equal", "equal", "ms_per_token", "ms_per_token", *MS)
UNEQUAL = Load(
    "trace", 256, "unequal", "trace", "tokens_per_second", "output_tokens_per_second", *SPEED
)


def against_peer(decode: Figures, peer: Figures, peer_traffic: Figures, *traffic: Figures) -> Rows:
    """Yield a row per case of `CASES` with the best settings, then the loads with defaults."""
    for (shape, rows, *_), ours, theirs in beside_peer(decode, peer):
        work = f"{size_of(shape)}, {plural(rows, 'request')}"
        compared = {"vllm": f"{theirs:.2f}", "best": f"{ours:.2f}", "gain": theirs / ours}
        yield {"work": work, "unit": MS[0], **compared}
    size = size_of(peer_traffic["shape"])
    for load in (EQUAL, UNEQUAL):
        former = {
            (x["engine"], x.get("setting")): x[load.key]
            for x in peer_traffic[load.part]["results"]
            if x.get("rows", ROWS) == ROWS
        }
        newer = _by_defaults(load, f"{size}, {load.lengths}", peer_traffic["device"], traffic)
        ours, date = newer or (former["jaxspec", "defaults"], peer_traffic["date"])
        theirs = former["vllm", None]
        yield {
            "work": f"{size}, {load.requests} requests of {load.words} lengths",
            "unit": load.unit,
            "vllm": f"{theirs:{load.form}}",
            "defaults": f"{ours:{load.form}} ({date})",
            "gain": theirs / ours if load is EQUAL else ours / theirs,
        }


def beside_peer(decode: Figures, peer: Figures) -> list[tuple[Any, float, float]]:
    """Return each of `CASES` with the milliseconds per token of jaxspec and of vLLM."""
    keys = "shape", "rows", "state_dtype", "steps_per_dispatch"
    ours = {
        tuple(x[key] for key in keys): x["ms_per_token"]
        for x in decode["results"]
        if x["drafts"] == DRAFTS and x["prompt"] == peer["prompt"]
    }
    theirs = {
        (x["shape"], x["rows"]): x["ms_per_token"] for x in peer["results"] if x["drafts"] == DRAFTS
    }
    return [(case, ours[case], theirs[case[:2]]) for case in CASES]


def _by_defaults(
    load: Load, work: str, device: str, traffic: Sequence[Figures]
) -> tuple[float, str] | None:
    """Return the value and the date of the load on the peer's card with no option but drafts."""
    for figures in traffic:
        for case in figures["results"]:
            is_load = work_of(case) == work and case["requests"] == load.requests
            is_alike = case["rows"] == ROWS and not options_of(case)
            if figures["device"] == device and is_load and is_alike and is_all_at_once(case):
                return case[load.our_key], case["date"]
    return None


def traffic_by_hand(figures: Figures) -> Rows:
    """Yield vLLM and jaxspec at one commit, with defaults and with settings chosen by hand."""
    for load in (EQUAL, UNEQUAL):
        for case in figures[load.part]["results"]:
            is_trace = load is UNEQUAL
            requests = "256 of unequal lengths" if is_trace else f"{case['rows']} x (512, 256)"
            engine = "vLLM" if case["engine"] == "vllm" else f"jaxspec, {case['setting']}"
            speed = f"{case[load.key]:{load.form}}"
            yield {"requests": requests, "engine": engine, "speed": speed, "unit": load.unit}
    for case in figures["long"]["results"]:
        if "tokens_per_second" in case:
            yield {
                "requests": f"{case['requests']} x (8192, 1024), {case['rows']} rows",
                "engine": f"jaxspec, by hand, {case['drafts']} drafts",
                "speed": f"{case['tokens_per_second']:,}",
                "unit": "tokens per second, in and out",
            }


def _late(name: str, form: str) -> str:
    """Return the format of a mean and its 99th percentile."""
    return f"{{{name}:{form}}} ({{{name}_p99:{form}}})"


def _middle(name: str, form: str = ".2f") -> str:
    """Return the format of a median and its 99th percentile, in milliseconds."""
    return f"{{{name}_ms_p50:{form}}} ({{{name}_ms_p99:{form}}})"


def _both(name: str) -> str:
    """Return the format of `_middle` of `LLM`, then of HTTP."""
    keys = [f"{way}[{name}_ms_{at}]" for way in ("llm", "http") for at in ("p50", "p99")]
    return "{{{}:,.1f}} ({{{}:,.1f}}), {{{}:,.1f}} ({{{}:,.1f}})".format(*keys)


TRAFFIC_LOAD = [("requests", "{load}"), ("options", "{by_hand}"), ("card", "{card}")]
SERVING_LOAD = TRAFFIC_LOAD[:2]

TABLES = {
    "against vLLM": Table(
        (*PEER, PEER_TRAFFIC, TRAFFIC),
        against_peer,
        ("model, work", "{work}"),
        ("unit", "{unit}"),
        ("vLLM", "{vllm}"),
        ("jaxspec, best settings", "{best}"),
        ("jaxspec, defaults", "{defaults}"),
        ("gain", "{gain:.2f}x"),
    ),
    "traffic by hand": Table(
        PEER_TRAFFIC,
        traffic_by_hand,
        ("requests (tokens in, out)", "{requests}"),
        ("engine", "{engine}"),
        ("speed", "{speed}"),
        ("unit", "{unit}"),
    ),
    "traffic": Table(
        TRAFFIC,
        traffic,
        *TRAFFIC_LOAD,
        ("tokens a second", "{output_tokens_per_second:,.0f}"),
        ("prompts too", "{total_tokens_per_second:,.0f}"),
        ("ms to the first token (p99)", _late("ttft_ms", ",.0f")),
        ("ms per token (p99)", _late("tpot_ms", ".1f")),
        ("ms of a gap: p99", "{gap_ms_p99:.1f}"),
        ("ms a token of the batch", "{ms_per_token:.2f}"),
        COMMIT,
    ),
    "time of traffic": Table(
        TRAFFIC,
        traffic,
        *TRAFFIC_LOAD,
        *((kind, f"{{{kind}:.0%}}") for kind in KINDS),
        ("prompt tokens needed", "{prompt_tokens_needed:.0%}"),
        ("rows needed", "{rows_needed:.0%}"),
        ("floor", "{of_floor:.0%} ({copy_tb_per_s:.2f} TB/s)"),
        COMMIT,
    ),
    "serving": Table(
        SERVING,
        serving("throughput"),
        *SERVING_LOAD,
        ("`LLM`: tokens a second", "{llm[output_tokens_per_second]:,.0f}"),
        ("HTTP", "{http[output_tokens_per_second]:,.0f}"),
        ("of `LLM`", spread("of_llm", ".1%")),
        ("ms to the first token (p99): `LLM`, HTTP", _both("ttft")),
        ("ms of a gap (p99): `LLM`, HTTP", _both("gap")),
        ("processors of the server", "{http[processors][server]:.0%}"),
        ("its event loop", "{http[processors][event_loop]:.0%}"),
        ("what asks it", "{http[processors][generator]:.0%}"),
        COMMIT,
    ),
    "serving: first token": Table(
        SERVING,
        serving("first-token"),
        *SERVING_LOAD,
        ("`LLM`: ms to the first token (p99)", _middle("llm")),
        ("HTTP (p99)", _middle("http")),
        ("more", "{overhead_ms:.2f}"),
        COMMIT,
    ),
    "serving: streams": Table(
        SERVING,
        serving("streams"),
        *SERVING_LOAD,
        ("tokens a second", "{output_tokens_per_second:,.0f}"),
        ("ms to plan a step (p99)", _middle("plan")),
        ("to dispatch it", _middle("dispatch")),
        ("to collect it", _middle("collect")),
        ("to hand it on", _middle("between")),
        ("the event loop's lag", _middle("loop_lag")),
        ("a gap", _middle("gap")),
        ("processors of the server", "{processors[server]:.0%}"),
        ("its event loop", "{processors[event_loop]:.0%}"),
        ("its engine's thread", "{processors[engine]:.0%}"),
        ("what asks it", "{processors[generator]:.0%}"),
        COMMIT,
    ),
    "prefixes found": Table(
        PREFIXES,
        prefixes("first-token", "host"),
        ("prompt", "{size}, {name}"),
        ("tokens", "{prompt_tokens:,}"),
        ("found", "{cached_tokens:,}"),
        ("ms to the first token (least to most)", spread("ttft_ms", ".1f")),
        COMMIT,
    ),
    "agents": Table(
        AGENTS,
        prefixes("agents"),
        ("engine", "{size}, {name} kept prefixes"),
        ("requests", "{requests}"),
        ("tokens of a prompt", "{tokens_each:,.0f}"),
        ("tokens a second (least to most)", spread("output_tokens_per_second", ",.0f")),
        ("prompts too", "{total_tokens_per_second:,.0f}"),
        ("found of what is shared", "{of_shared:.1%}"),
        ("ms to the first token (p90)", "{ttft_ms:,.0f} ({ttft_ms_p90:,.0f})"),
        COMMIT,
    ),
    "prefixes not found": Table(
        PREFIXES,
        prefixes("decode"),
        ("rows", "{size}, {sizes[rows]}"),
        ("ms a token without", spread("without_ms", ".3f")),
        ("with kept prefixes", spread("with_ms", ".3f")),
        ("ratio (least to most)", spread("ratio", ".3f")),
        ("of whole runs", spread("ratio_whole", ".3f")),
        COMMIT,
    ),
    "copies of states": Table(
        PREFIXES,
        prefixes("copies"),
        ("program", "{size}, {name}"),
        ("microseconds, back to back (least to most)", spread("us", ".1f")),
        ("on the device", "{device_us:.1f}"),
        ("MB that must move", "{megabytes:.1f}"),
        ("of the copy bandwidth", "{of_copy:.0%}"),
        COMMIT,
    ),
}
