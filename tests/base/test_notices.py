from imagenet_fast.base.notices import warn_once


def test_each_message_is_printed_once(capsys):
    for message in ("a new one", "another new one", "a new one"):
        warn_once(message)
    assert capsys.readouterr().err == "a new one\nanother new one\n"
