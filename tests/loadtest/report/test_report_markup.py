"""Elements: what they hold is text, whatever it looks like."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.report.markup import coordinate, element, written


def test_a_text_that_looks_like_markup_stays_a_text():
    made = written(element("p", "<script>alert('&amp;')</script>", aria_label='"><b>'))
    assert "<script>" not in made
    read = ET.fromstring(made)
    assert (read.text, read.get("aria-label")) == ("<script>alert('&amp;')</script>", '"><b>')


@given(st.text(), st.text())
def test_any_text_gives_well_formed_xml(content, attribute):
    read = ET.fromstring(written(element("p", content, "|", element("b", content), content, data_of=attribute)))
    assert read.tag == "p"
    assert [child.tag for child in read] == ["b"]


def test_what_xml_can_not_hold_is_replaced():
    assert written(element("p", "a\x00b\x1bc\ud800d\ufffee")) == "<p>a\ufffdb\ufffdc\ufffdd\ufffde</p>"


def test_texts_and_elements_keep_their_order():
    assert written(element("p", "a", "b", element("i", "c"), "d", "e")) == "<p>ab<i>c</i>de</p>"


def test_names_of_attributes_are_those_of_html():
    assert written(element("line", class_="a", text_anchor="end", x1=2.25, y1=None)) == (
        '<line class="a" text-anchor="end" x1="2.2"></line>'
    )


def test_an_element_without_an_end_tag_is_refused():
    with pytest.raises(ValueError, match="br has no end tag"):
        element("br")


@pytest.mark.parametrize(("value", "text"), [(0, "0"), (-0.04, "0"), (12.0, "12"), (12.25, "12.2"), (1219.96, "1220")])
def test_coordinates_have_one_decimal(value, text):
    assert coordinate(value) == text
