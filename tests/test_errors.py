from imagenet_fast.errors import UserError, nearest


def test_nearest_first():
    names = ["momentum", "model", "model_dir", "seed"]
    assert nearest("modl", names) == "; did you mean 'model' or 'model_dir'?"
    assert nearest("model_dri", iter(names)) == "; did you mean 'model_dir' or 'model'?"


def test_no_more_than_three():
    assert nearest("x1", ["x2", "x3", "x4", "x5"]).count("'x") == 3


def test_nothing_near():
    assert nearest("qqq", ["momentum", "seed"]) == ""
    assert nearest("momentum", []) == ""


def test_user_error_is_caught_as_what_keras_users_expect():
    assert issubclass(UserError, ValueError)
