import keras
import pytest
import tensorflow as tf

from imagenet_fast.base.errors import UserError, nearest


def test_nearest_first():
    names = ["momentum", "model", "model_dir", "seed"]
    assert nearest("modl", names) == "; did you mean 'model' or 'model_dir'?"
    assert nearest("model_dri", iter(names)) == "; did you mean 'model_dir' or 'model'?"


def test_names_can_be_replaced_by_other_text():
    paths = {"digits": "runs/digits.flags", "photos": "runs/photos.flags"}
    assert nearest("digit", paths, paths.get) == "; did you mean runs/digits.flags?"


def test_no_more_than_three():
    assert nearest("x1", ["x2", "x3", "x4", "x5"]).count("'x") == 3


def test_no_name_is_close():
    assert nearest("qqq", ["momentum", "seed"]) == ""
    assert nearest("momentum", []) == ""


def test_user_error_is_a_value_error():
    assert issubclass(UserError, ValueError)


def test_fit_does_not_change_a_layers_user_error():
    class Picky(keras.layers.Dense):
        def call(self, inputs, training=None):
            if training:
                raise UserError("not with me")
            return super().call(inputs)

    model = keras.Sequential([keras.Input([2]), Picky(1)])
    model.compile("sgd", "mse")
    with pytest.raises(UserError) as error:
        model.fit(tf.zeros([2, 2]), tf.zeros([2]), verbose=0)
    assert str(error.value) == "not with me"
