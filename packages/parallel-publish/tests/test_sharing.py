"""What leaves this machine of a document, and what does not."""

import json

import pytest

from parallel_publish import shareable
from parallel_publish.sharing import shareable_bytes


@pytest.mark.parametrize(
    ("given", "shared"),
    [
        ("/home/me/data/drawers", "drawers"),
        ("/home/me/data/drawers/", "drawers"),
        ("~/drawers", "drawers"),
        ("../me/drawers", "drawers"),
        ("file:///home/me/drawers", "drawers"),
        ("C:\\Users\\me\\drawers", "drawers"),
        ("/", "."),
        ("outputs/first", "outputs/first"),
        ("user/name", "user/name"),
        ("package.module:Class", "package.module:Class"),
        ("https://me:secret@host/x", "https://host/x"),
        ("use hf_abcdefghijklmnopqrst now", "use removed now"),
        ("", ""),
    ],
)
def test_paths_and_tokens_are_taken_out_of_values(given, shared):
    assert json.loads(shareable(json.dumps({"a": [{"b": given}]}))) == {"a": [{"b": shared}]}


def test_values_of_fields_named_like_secrets_are_removed():
    document = {"wandb": {"api_key": "abc", "token": None}, "use_task_token": "abc", "tokens": 3}
    assert json.loads(shareable(json.dumps(document))) == {
        "wandb": {"api_key": "removed", "token": None},
        "use_task_token": "removed",
        "tokens": 3,
    }


@pytest.mark.parametrize("text", ['{"lr": 1e-05, "x": 0.30000000000000004}', "no json", "[]"])
def test_a_text_without_anything_to_hide_is_sent_unchanged(text):
    assert shareable(text) == text


def test_paths_are_taken_out_of_a_document_with_a_byte_order_mark(tmp_path):
    """An editor may have put it there; the document is one all the same."""
    file = tmp_path / "config.json"
    file.write_text('{"a": "/home/me/x"}', encoding="utf-8-sig")
    assert json.loads(shareable_bytes(file)) == {"a": "x"}
    assert json.loads(shareable(file.read_text(encoding="utf-8"))) == {"a": "x"}
