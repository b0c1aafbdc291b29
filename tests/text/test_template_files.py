"""Where a checkpoint's chat templates are looked for, and what may be there."""

import pytest
from tokenizer_folders import folder_with

from jaxspec.text.tokenizer import Tokenizer

TOOL = {"type": "function", "function": {"name": "f", "description": "<é>"}}


def test_a_template_is_taken_from_its_own_file_then_the_settings_then_the_old_file(tmp_path):
    named = [{"name": "default", "template": "named"}, {"name": "tool_use", "template": "tools"}]
    folder = folder_with(tmp_path, chat_template_json={"chat_template": "old"})
    assert Tokenizer(folder).render_chat([]) == "old"
    folder_with(tmp_path, tokenizer_config_json={"chat_template": "settings"})
    assert Tokenizer(folder).render_chat([]) == "settings"
    folder_with(tmp_path, tokenizer_config_json={"chat_template": named})
    assert Tokenizer(folder).render_chat([]) == "named"
    assert Tokenizer(folder).render_chat([], tools=[TOOL]) == "tools"
    folder_with(tmp_path, chat_template_jinja="own")
    assert Tokenizer(folder).render_chat([]) == "own"


@pytest.mark.parametrize("template", [3, [], [3], [{"name": "default"}], [{"template": "a"}], {}])
@pytest.mark.parametrize("name", ["tokenizer_config_json", "chat_template_json"])
def test_a_template_is_a_text_or_a_list_of_named_ones(name, template, tmp_path):
    folder = folder_with(tmp_path, **{name: {"chat_template": template}})
    if template == []:
        with pytest.raises(ValueError, match="has none"):
            Tokenizer(folder).render_chat([])
    else:
        with pytest.raises(
            ValueError, match=r"json: chat_template must be a text, or a list .* got"
        ):
            Tokenizer(folder)


def test_a_template_of_more_than_so_many_bytes_is_refused(tmp_path):
    long = "a" * (2**20 + 1)
    with pytest.raises(ValueError, match="config.json: a chat template must have at most 1,048,57"):
        Tokenizer(folder_with(tmp_path, tokenizer_config_json={"chat_template": long}))
    with pytest.raises(ValueError, match="jinja: a chat template must have at most 1,048,576 byte"):
        Tokenizer(folder_with(tmp_path, chat_template_jinja=long))
    (tmp_path / "chat_template.jinja").write_bytes(b"ab\xff")
    with pytest.raises(ValueError, match="jinja must be UTF-8 text, and byte 2 is not"):
        Tokenizer(tmp_path)


def test_further_templates_have_the_names_of_their_files(tmp_path):
    further = tmp_path / "additional_chat_templates"
    further.mkdir()
    (further / "tool_use.jinja").write_text("{{ tools | length }} tools")
    tokenizer = Tokenizer(folder_with(tmp_path, tokenizer_config_json={"chat_template": "Hi"}))
    assert tokenizer.render_chat([]) == "Hi"
    assert tokenizer.render_chat([], [{}]) == "1 tools"
    assert tokenizer.chat_template == "{{ tools | length }} tools"
