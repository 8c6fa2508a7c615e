"""Writes ``tf_keras.keras``, what tf_keras 2.21 saves of many layers: `python SCRIPT FILE`."""

import sys

import numpy as np
import tf_keras as keras

layers = keras.layers
keras.utils.set_random_seed(0)
images = keras.Input((8, 8, 3))
part = keras.Sequential(
    [layers.Conv2D(3, 3, padding="same", activation="gelu"), layers.Dropout(0.1)]
)
shared = layers.BatchNormalization(gamma_regularizer="l2", moving_mean_initializer="he_normal")
x = layers.Add()([shared(part(layers.Rescaling(1 / 255)(images))), shared(part(part(images)))])
x = layers.SeparableConv2D(4, 3, dtype="mixed_bfloat16", depthwise_regularizer="l2")(x)
x = layers.DepthwiseConv2D(3, activation="relu")(layers.RandomFlip("horizontal")(x))
inner = keras.Input((4, 4, 4))
x = keras.Model(inner, layers.Normalization(mean=[1, 2, 3, 4], variance=[1, 2, 2, 1])(inner))(x)
x = layers.Reshape((16, 4))(layers.GroupNormalization(2)(x))
x = layers.MultiHeadAttention(2, 2)(x, value=layers.LayerNormalization()(x))
x = layers.GRU(3)(layers.Bidirectional(layers.LSTM(2, return_sequences=True))(x))
model = keras.Model(images, layers.Dense(7, dtype="float32")(x))
model.compile("sgd", "mse")
model.save(sys.argv[1])
rows = np.random.default_rng(0).uniform(0, 255, (2, 8, 8, 3)).astype("float32")
print(np.array(model(rows, training=False)).tolist())
