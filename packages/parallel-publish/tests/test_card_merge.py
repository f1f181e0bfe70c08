"""What a person has changed in a card on the Hub stays; our part between the marks is renewed."""

import pytest

from parallel_publish.card import CardInfo, render_card
from parallel_publish.card_merge import BEGIN, END, merge_cards

OLD = render_card(CardInfo(title="Old", license="mit", tags=("a",)))
NEW = render_card(CardInfo(title="New \\1", license="mit", tags=("a",), library_name="x"))
NO_MARKS = "does not have our marks exactly once: its text is kept, and our part is added below"


def body(text):
    return text.split("---\n", 2)[-1]


def test_our_part_is_renewed_and_new_metadata_is_added():
    found = merge_cards(NEW, OLD)
    assert found.said == ()
    assert "# New \\1" in found.text
    assert "Old" not in found.text
    assert found.text.startswith('---\nlicense: "mit"\ntags:\n- "a"\nlibrary_name: "x"\n---\n')


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_text_around_it_and_changed_metadata_stay(line_end):
    head = "---\nlicense: apache-2.0\n# mine\ntags:\n- a\nlanguage: en\n---\n"
    edited = head + "Above.\n" + body(OLD) + "\nBelow.\n"
    found = merge_cards(NEW, edited.replace("\n", line_end))
    assert found.text.startswith(head.removesuffix("---\n") + 'library_name: "x"\n---\nAbove.\n')
    assert found.text.rstrip().endswith("Below.")
    assert found.text.count("# New") == found.text.count(BEGIN) == 1
    assert found.said == ("keeps its own license, other than what was to be sent",)


@pytest.mark.parametrize(
    "theirs",
    [
        "# Mine\n\nAll by hand.\n",
        f"# Mine\n{BEGIN}\nhalf a section",
        f"# Mine\n{BEGIN}\n{END}\n{BEGIN}\n{END}\n",
        f"# Mine\n{END}\n{BEGIN}\n",
    ],
)
def test_a_card_without_our_marks_once_stays_whole_and_gets_our_part_below(theirs):
    found = merge_cards(NEW, theirs)
    assert theirs.strip() in found.text
    assert found.text.rstrip().endswith(body(NEW).strip())
    assert found.said == (NO_MARKS,)


def test_a_card_of_the_hub_that_is_metadata_alone_is_filled():
    found = merge_cards(NEW, "---\nlicense: mit\n---\n")
    assert found.said == ()
    assert body(found.text).strip() == body(NEW).strip()


@pytest.mark.parametrize("ours", ["# By hand\n", NEW + "\nA line by hand.\n"])
def test_a_card_that_was_written_by_hand_here_is_sent_as_it_is(ours):
    assert merge_cards(ours, OLD).text == ours
