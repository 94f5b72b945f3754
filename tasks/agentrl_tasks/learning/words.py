"""Words and names of the small tasks."""

from __future__ import annotations

_WORDS = """
air arm art bag ball bank base bath bed bell bird boat body bone book box boy bread brush cake camp card cart cat chain
chalk child city clock cloth cloud coal coat cook cord corn cow cup day desk dog door drop dust ear edge egg end eye face
farm fish flag floor flour foot fork frame fruit game gate girl glass gold grain grass hair hall hand hat head heart hill
home hook horn horse house ice iron jar jump key king knee knife lake lamp land leaf leg line lip lock map mark milk mind
moon mouth name neck nest net north nose note nut oil page paint pan park part path pen pin pipe place plant plate pot rail
rain ring river road roof room root rope salt sand sea seat seed sheep shelf ship shirt shoe side sign silk skin sky sleep
snow soap sock song soup south spoon star steam stem step stone storm street sugar sun table tail taste test thing tooth
town train tray tree wall watch water wave wheel wind wing winter wire wood wool word work year
"""
_FIRST_NAMES = """
Ada Ben Cleo Dan Elsa Finn Gus Hana Ivy Jon Kim Leo Mia Noah Olga Paul Rosa Sam Tess Uma Vera Will Xena Yuri Zoe
"""
_LAST_NAMES = """
Adler Berg Cole Dunn Ellis Ford Grant Hill Irwin Jones Klein Lane Moore Nash Owens Park Quinn Reed Stone Todd Upton Vance
West Young Zhang
"""

WORDS = tuple(_WORDS.split())
"""Common words of two to six letters."""
FIRST_NAMES, LAST_NAMES = tuple(_FIRST_NAMES.split()), tuple(_LAST_NAMES.split())
