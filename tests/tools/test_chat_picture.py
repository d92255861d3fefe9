import xml.etree.ElementTree as ET

from tools.chat_picture import draw


def test_a_picture_is_of_all_that_is_printed_and_loads_nothing() -> None:
    picture = draw("> why\n\x1b[36mbecause\x1b[0m <b> & more\n")
    assert "http" not in picture.replace("http://www.w3.org/2000/svg", "").replace(
        "https://www.textualize.io", ""
    )
    words = "".join(ET.fromstring(picture).itertext()).replace("\xa0", " ")
    for part in ("redrafter chat --show", "> why", "because", "<b> & more"):
        assert part in words
