"""Options of the server: their rules, and the file of keys."""

import pytest

from jaxspec.server.options import OPTIONS, ServerOptions


def test_the_defaults_keep_to_themselves():
    options = ServerOptions()
    assert options.host == "127.0.0.1" and options.allowed_origins == ()
    assert options.keys() == () and not options.trust_request_chat_template
    assert all(field.metadata["help"] for field in OPTIONS.values())


@pytest.mark.parametrize(
    "given, said",
    [
        ({"port": -1}, "port must be an integer of at least 0, got -1"),
        ({"port": 65536}, "port must be at most 65535, got 65536"),
        ({"port": "x"}, "port must be an integer of at least 0, got 'x'"),
        ({"api_processes": 0}, "api_processes must be an integer of at least 1, got 0"),
        ({"api_processes": 257}, "api_processes must be at most 256, got 257"),
        ({"max_n": 0}, "max_n must be an integer of at least 1"),
        ({"max_body_mib": 2**30}, "max_body_mib must be at most"),
        ({"shutdown_timeout": float("nan")}, "shutdown_timeout must be a finite number, got nan"),
        ({"shutdown_timeout": -1.0}, "shutdown_timeout must be at least 0 seconds, got -1.0"),
        ({"stream_interval": 0}, "stream_interval must be an integer of at least 1, got 0"),
        ({"queue_timeout": 0}, "queue_timeout must be seconds above 0, got 0"),
        ({"stream_keep_alive": 0}, "stream_keep_alive must be seconds above 0, got 0"),
        ({"stream_stall_timeout": -1}, "stream_stall_timeout must be seconds above 0, got -1"),
        ({"access_log": "yes"}, "access_log must be True or False"),
        ({"api_key": ("a", "")}, "Each of api_key must be a text that is not empty"),
        ({"allowed_origins": ['["*"]']}, "allowed_origins must be origins"),
        ({"tool_call_parser": "kimi_k2"}, "tool_call_parser must be one of .*hermes.*'kimi_k2'"),
        ({"reasoning_parser": "gemma4"}, "reasoning_parser must be one of .*qwen3.*'gemma4'"),
        ({"max_stored_responses": -1}, "max_stored_responses must be an integer of at least 0"),
        ({"served_model_name": "x"}, "served_model_name must be a list"),
    ],
)
def test_an_option_that_breaks_its_rule_is_refused(given, said):
    with pytest.raises(ValueError, match=said):
        ServerOptions(**given)


def test_keys_come_from_the_command_and_from_a_file(tmp_path):
    path = tmp_path / "keys"
    path.write_text("first\n\n  second \r\n")
    assert ServerOptions(api_key=("own",), api_key_file=path).keys() == ("own", "first", "second")


def test_a_file_without_keys_lets_nobody_in_by_mistake(tmp_path):
    path = tmp_path / "keys"
    with pytest.raises(ValueError, match="can't be read"):
        ServerOptions(api_key_file=path).keys()
    path.write_text("\n \n")
    with pytest.raises(ValueError, match="must hold a key on a line"):
        ServerOptions(api_key_file=path).keys()
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="UTF-8"):
        ServerOptions(api_key_file=path).keys()
