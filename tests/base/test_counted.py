from imagenet_fast.base.counted import counted


def test_nouns_agree_with_their_numbers():
    assert counted(1, "image") == "1 image"
    assert [counted(number, "image") for number in (0, 1000)] == ["0 images", "1,000 images"]
    assert counted(2, "class", "classes") == "2 classes"
