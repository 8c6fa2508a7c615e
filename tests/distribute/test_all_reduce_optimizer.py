import keras
import numpy as np
import pytest
import tensorflow as tf

from imagenet_fast import UserError
from imagenet_fast.distribute.all_reduce import AllReduce
from imagenet_fast.distribute.all_reduce_optimizer import AllReduceMixin, with_all_reduce
from imagenet_fast.optimizers.loss_scale import scaled_loss


class Recorded(AllReduce):
    """Doubles gradients, to show that it was asked."""

    def __call__(self, gradients, exact=(), *, variables=None):
        assert len(gradients) == len(variables)
        return [2 * gradient for gradient in super().__call__(gradients, exact)]


def take_step(optimizer):
    variables = [tf.Variable([3.0, 4.0]), tf.Variable(5.0)]
    optimizer.build(variables)
    optimizer.apply_gradients(zip([tf.constant([0.3, 0.4]), None], variables))
    return variables[0].numpy()


def test_same_class_each_time():
    own = with_all_reduce(keras.optimizers.SGD)
    assert own is with_all_reduce(keras.optimizers.SGD)
    assert issubclass(own, keras.optimizers.SGD)
    assert issubclass(own, AllReduceMixin)


@pytest.mark.parametrize("make", [lambda: None, AllReduce], ids=["none", "builtin"])
def test_one_replica_takes_keras_step(make):
    own = with_all_reduce(keras.optimizers.SGD)(0.1, all_reduce=make())
    np.testing.assert_array_equal(take_step(own), take_step(keras.optimizers.SGD(0.1)))


def test_the_sum_is_asked_and_clipping_comes_after_it():
    own = with_all_reduce(keras.optimizers.SGD)
    np.testing.assert_allclose(take_step(own(1.0, all_reduce=Recorded())), [2.4, 3.2], rtol=1e-6)
    clipped = take_step(own(1.0, all_reduce=Recorded(), global_clipnorm=0.75))
    np.testing.assert_allclose(clipped, [3 - 0.45, 4 - 0.6], rtol=1e-6)


def test_the_sum_is_asked_inside_a_loss_scale():
    inner = with_all_reduce(keras.optimizers.SGD)(1.0, all_reduce=Recorded())
    optimizer = keras.mixed_precision.LossScaleOptimizer(inner, initial_scale=2.0)
    variable = tf.Variable([3.0, 4.0])
    scaled = scaled_loss(optimizer, tf.constant([0.3, 0.4]))
    optimizer.apply([scaled], [variable])
    np.testing.assert_allclose(variable, [2.4, 3.2], rtol=1e-6)


def test_the_configuration_leaves_the_sum_out(tmp_path):
    own = with_all_reduce(keras.optimizers.Adam)
    optimizer = own(0.25, beta_1=0.5, all_reduce=AllReduce())
    for again in (
        own.from_config(optimizer.get_config()),
        keras.optimizers.deserialize(keras.optimizers.serialize(optimizer)),
    ):
        assert type(again) is own
        assert again.all_reduce is None
        assert again.get_config() == optimizer.get_config()
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(optimizer, "mse")
    model.fit(np.ones([4, 2]), np.ones([4, 1]), verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer) is own
    assert loaded.optimizer.iterations == 1


@pytest.mark.parametrize("wrong", [keras.losses.Loss, keras.layers.Dense, "sgd"])
def test_not_an_optimizer(wrong):
    with pytest.raises(UserError, match="needs a Keras optimizer class"):
        with_all_reduce(wrong)
