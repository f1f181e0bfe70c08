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


def test_metadata_holds_the_fields_that_were_given():
    assert _metadata(render_card(FULL)) == {
        "license": "apache-2.0",
        "base_model": "user/base",
        "datasets": ["user/drawers"],
        "tags": ["robotics", "a: tag, with 'quotes'"],
    }


def test_fields_without_a_value_are_left_out():
    text = render_card(CardInfo(tags=("x",)))
    assert _metadata(text) == {"tags": ["x"]}
    assert "None" not in text
    assert "null" not in text
    assert not render_card(CardInfo()).startswith("---")


def test_the_hub_accepts_the_rendered_card():
    assert list(card_errors(render_card(FULL))) == []
    assert list(card_errors("---\ntags:\n- null\nlicense: null\n---\n")) != []


def test_a_card_does_not_name_folders_of_this_machine():
    assert "/home/somebody" not in render_card(FULL)
    assert "metaworld_mini" in render_card(FULL)


@pytest.mark.parametrize("fields", [{"license": "mine"}, {"base_model": "/x"}, {"tags": ("",)}])
def test_a_field_that_the_hub_would_refuse_is_named(fields):
    assert [problem.path for problem in card_problems(CardInfo(**fields))] == [
        f"card.{next(iter(fields))}"
    ]


def test_the_publish_config_overrides_the_card():
    config = PublishConfig(license="mit", tags=("b", "a"))
    info = CardInfo(license="apache-2.0", tags=("a",)).with_config(config)
    assert (info.license, info.tags) == ("mit", ("a", "b"))


@pytest.mark.parametrize(
    "losses", [[], [(5, 1.0)], [(1, 1.0), (2, float("nan"))], [(i, 1 / i) for i in range(1, 5000)]]
)
def test_the_loss_curve_is_a_small_svg_without_nan(losses):
    text = loss_curve_svg(losses)
    assert ElementTree.fromstring(text).tag.endswith("svg")
    assert "nan" not in text
    assert len(text) < 20_000
