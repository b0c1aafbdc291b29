"""Options of the HTTP server: type, default and help text of each.

The help of `python -m jaxspec serve` is generated from `ServerOptions`.
"""

import dataclasses
import sys
from pathlib import Path
from typing import Any

from jaxspec import checks
from jaxspec.checks import shown
from jaxspec.options.engine_options import option
from jaxspec.options.option_values import read
from jaxspec.text.parsers import REASONING_PARSERS, TOOL_PARSERS


@dataclasses.dataclass(frozen=True)
class ServerOptions:
    """Address, access and limits of the server.

    Raises:
        ValueError: an option is invalid.
    """

    host: str = option("127.0.0.1", "address to bind; 0.0.0.0 binds all interfaces")
    port: int = option(8000, "port to bind; 0 chooses a free port", least=0)
    api_processes: int = option(
        1,
        "number of HTTP processes; with more than 1 the engine runs in a process of its own, which "
        "helps with many streams of a small model",
    )
    served_model_name: tuple[str, ...] = option(
        (), "model names accepted in requests; responses contain the first", none="MODEL"
    )
    api_key: tuple[str, ...] = option(
        (),
        "accepted API keys; other users can read command lines, so prefer api_key_file",
    )
    api_key_file: str | Path | None = option(
        None, "UTF-8 text file with an API key per line", none="no file"
    )
    protect_metrics: bool = option(False, "require an API key for /metrics, too")
    allowed_origins: tuple[str, ...] = option((), "origins allowed by CORS; * allows all")
    enable_rollouts: bool = option(
        False,
        "serve the routes of trainers, such as /pause, /sleep and /update_weights, to clients with "
        "an API key",
    )
    weights_folders: tuple[str, ...] = option(
        (), "folders in which /update_weights may read weights"
    )
    trust_request_chat_template: bool = option(
        False, "accept chat templates in requests, which run in a sandbox"
    )
    tool_call_parser: str | None = option(
        None,
        f"format of tool calls: {', '.join(TOOL_PARSERS)}",
        none="the chat template's",
    )
    reasoning_parser: str | None = option(
        None,
        f"format of reasoning, between <think> and </think>: {', '.join(REASONING_PARSERS)}",
        none="the chat template's",
    )
    enable_auto_tool_choice: bool = option(True, "accept tools, and parse the model's calls")
    max_body_mib: int = option(32, "maximum size of a request body, in MiB")
    h11_max_incomplete_event_size: int = option(
        65_536, "maximum bytes of a request's headers; more get status 431"
    )
    header_timeout: float = option(
        10.0, "seconds for the headers of a request, from its first byte or the connection's start"
    )
    limit_concurrency: int = option(
        8192, "maximum number of open connections of an HTTP process; more get status 503"
    )
    limit_concurrency_per_address: int = option(
        2048, "the same for each client address, of which a proxy may need more"
    )
    max_n: int = option(128, "maximum number of samples per prompt")
    max_stop: int = option(16, "maximum number of stop strings per request", least=0)
    max_stored_responses: int = option(
        1000,
        "maximum number of responses kept in memory for previous_response_id; with several API "
        "processes, which share none, 0",
        least=0,
    )
    max_stored_mib: int = option(64, "maximum size of stored responses together, in MiB")
    max_num_queued_reqs: int | None = option(
        None, "maximum number of waiting requests; more get status 503", none="no limit"
    )
    max_num_queued_tokens: int | None = option(
        None, "maximum number of waiting prompt tokens; more get status 503", none="no limit"
    )
    queue_timeout: float | None = option(
        None, "seconds a request may wait for a row before it gets status 408", none="no limit"
    )
    stream_interval: int = option(
        1,
        "minimum number of tokens per chunk of a stream, except for the first and the last chunk",
    )
    shutdown_timeout: float = option(
        30.0,
        "seconds for requests to finish after SIGTERM or Ctrl-C; a second signal exits at once",
    )
    stream_stall_timeout: float = option(
        60.0, "seconds after which a stream that its client does not read is aborted"
    )
    stream_keep_alive: float = option(
        15.0,
        "seconds without output after which a stream sends a comment, so that proxies keep it open",
    )
    exit_on_failure: bool = option(
        False,
        "exit with status 1 when a step fails; otherwise requests and /health get status 503",
    )
    warm_up: bool = option(
        True,
        "compile the programs that serve any request before opening the port; otherwise the first "
        "request waits for them",
    )
    access_log: bool = option(True, "log the route and status of each request")
    throughput_log: bool = option(
        True, "log tokens per second, requests and cache use every 10 seconds while requests run"
    )

    def __post_init__(self) -> None:
        """Validate each option and convert it to a plain Python type."""
        for field in OPTIONS.values():
            value = getattr(self, field.name)
            value = _texts(field.name, value) if field.default == () else read(field, value)
            object.__setattr__(self, field.name, value)
        for name in _SECONDS:
            seconds = getattr(self, name)
            if seconds is not None and seconds <= 0:
                raise ValueError(f"{name} must be seconds above 0, got {seconds}.")
        for origin in self.allowed_origins:
            if origin not in ("*", "null") and "://" not in origin:
                raise ValueError(
                    f"allowed_origins must be origins such as https://a.example, or *, got "
                    f"{shown(origin)}. Repeat the option for several."
                )
        for name, known in _PARSERS.items():
            given = getattr(self, name)
            if given is not None and given not in known:
                raise ValueError(
                    f"{name} must be one of {', '.join(known)}, got {shown(given)}. Leave it out, "
                    "so that the chat template decides."
                )
        if self.shutdown_timeout < 0:
            raise ValueError(
                f"shutdown_timeout must be at least 0 seconds, got {self.shutdown_timeout}."
            )
        if self.api_processes > _MAX_PROCESSES:
            raise ValueError(
                f"api_processes must be at most {_MAX_PROCESSES}, got {self.api_processes}."
            )
        if self.api_processes > 1 and sys.platform == "win32":
            raise ValueError(
                f"api_processes must be 1 on Windows, where processes can't share a port, got "
                f"{self.api_processes}."
            )
        self._check_rollouts()
        if self.port > 65535:
            raise ValueError(f"port must be at most 65535, got {self.port}.")

    def _check_rollouts(self) -> None:
        if self.enable_rollouts and not (self.api_key or self.api_key_file):
            raise ValueError(
                "enable_rollouts needs api_key_file or api_key, for clients change the model, got "
                "neither. Write a key to a file."
            )
        if self.enable_rollouts and self.api_processes > 1:
            raise ValueError(
                "enable_rollouts needs api_processes=1, whose routes call the engine in their own "
                f"process, got {self.api_processes}."
            )
        if self.weights_folders and not self.enable_rollouts:
            raise ValueError(
                "weights_folders is an option of enable_rollouts, got "
                f"{shown(self.weights_folders)} without it. Set enable_rollouts."
            )

    def keys(self) -> tuple[str, ...]:
        """Return all API keys, including those of `api_key_file`.

        Raises:
            ValueError: the file can't be read, or holds no key.
        """
        if self.api_key_file is None:
            return self.api_key
        try:
            lines = Path(self.api_key_file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"api_key_file must be a UTF-8 text file with a key on each line, and "
                f"{self.api_key_file} can't be read: {error}. Check the path."
            ) from error
        found = tuple(line.strip() for line in lines if line.strip())
        if not found:
            raise ValueError(
                f"api_key_file must hold a key on a line, and {self.api_key_file} holds none. "
                "Write one there, or leave the option out to accept all requests."
            )
        return self.api_key + found


def _texts(name: str, values: Any) -> tuple[str, ...]:
    found = checks.items(values, _MAX_TEXTS)
    if found is None or len(found) > _MAX_TEXTS:
        raise ValueError(
            f"{name} must be a list of at most {_MAX_TEXTS:,} texts, got {shown(values)}."
        )
    return tuple(checks.text(f"Each of {name}", value) for value in found)


_MAX_TEXTS = 10_000
_MAX_PROCESSES = 256
_PARSERS = {"tool_call_parser": TOOL_PARSERS, "reasoning_parser": REASONING_PARSERS}
# Must be above 0.
_SECONDS = ("header_timeout", "queue_timeout", "stream_stall_timeout", "stream_keep_alive")
OPTIONS = {field.name: field for field in dataclasses.fields(ServerOptions)}
"""Option fields by name, in order."""
