"""The card: metadata the Hub takes, code that runs, a picture that parses."""

import xml.etree.ElementTree as ElementTree

import pytest
import yaml

from parallel_publish import PublishConfig
from parallel_publish.card import CardInfo, card_problems, loss_curve_svg, render_card
from parallel_testing.hub import card_errors

FULL = CardInfo(
    title="ACT on drawers",
    license="apache-2.0",
    tags=("robotics", "a: tag, with 'quotes'"),
    datasets=("user/drawers", "/home/somebody/data/metaworld_mini"),
    base_model="user/base",
    facts={"steps": 400, "notes": None, "global batch": 64},
    metrics={"loss": 0.25, "success": 0.9},
    losses=[(1, 2.0), (2, 1.0)],
    train_config='{"steps": 400}',
)


def _metadata(text):
    return yaml.safe_load(text.split("---\n")[1])


def test_metadata_is_what_was_said():
    assert _metadata(render_card(FULL)) == {
        "license": "apache-2.0",
        "base_model": "user/base",
        "datasets": ["user/drawers"],
        "tags": ["robotics", "a: tag, with 'quotes'"],
    }


def test_what_is_unknown_is_left_out():
    text = render_card(CardInfo(tags=("x",)))
    assert _metadata(text) == {"tags": ["x"]}
    assert "None" not in text
    assert "null" not in text
    assert not render_card(CardInfo()).startswith("---")


def test_the_hub_takes_it():
    assert list(card_errors(render_card(FULL))) == []
    assert list(card_errors("---\ntags:\n- null\nlicense: null\n---\n")) != []


def test_folders_of_this_machine_are_not_told():
    assert "/home/somebody" not in render_card(FULL)
    assert "metaworld_mini" in render_card(FULL)


@pytest.mark.parametrize("fields", [{"license": "mine"}, {"base_model": "/x"}, {"tags": ("",)}])
def test_problems_are_found_before_the_hub_finds_them(fields):
    assert [problem.path for problem in card_problems(CardInfo(**fields))] == [
        f"card.{next(iter(fields))}"
    ]


def test_the_config_speaks_last():
    config = PublishConfig(license="mit", tags=("b", "a"))
    info = CardInfo(license="apache-2.0", tags=("a",)).with_config(config)
    assert (info.license, info.tags) == ("mit", ("a", "b"))


@pytest.mark.parametrize(
    "losses", [[], [(5, 1.0)], [(1, 1.0), (2, float("nan"))], [(i, 1 / i) for i in range(1, 5000)]]
)
def test_the_curve_is_a_picture(losses):
    text = loss_curve_svg(losses)
    assert ElementTree.fromstring(text).tag.endswith("svg")
    assert "nan" not in text
    assert len(text) < 20_000
