"""What training by a recipe does, against the original authors' code.

Each row of ``ROWS`` is a value in somebody else's repository, with its file and line. A probe
measures it on what a run is made of: the built schedule, optimizer and network, and the crops,
pixels and image sizes of the input pipeline; it does not read the flagfile. Where we differ, the
row has our value and the words with which the recipe's header says so.
"""

# ruff: noqa: E501  (one row a line)

import dataclasses
import functools
import math
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from imagenet_fast.base.shared_options import SharedOptions
from imagenet_fast.config import Config
from imagenet_fast.data.augmentation.augment import augment, draw_changes
from imagenet_fast.data.augmentation.crop_boxes import evaluation_crop_boxes, training_crop_boxes
from imagenet_fast.data.decode import resize
from imagenet_fast.data.steps import training_image_size
from imagenet_fast.layers import PixelNormalization
from imagenet_fast.models.options import ModelOptions
from imagenet_fast.recipes import find_recipe
from imagenet_fast.training.build.model import build_classifier
from imagenet_fast.training.build.network import build_network, precision_policy
from imagenet_fast.training.build.optimizer import build_optimizer
from imagenet_fast.training.build.schedule import build_schedule
from imagenet_fast.training.schedule_steps import total_steps
from imagenet_fast.training.step.losses import image_losses

IMAGES = 1_281_167
CIFAR10_IMAGES = 50_000


@dataclasses.dataclass(frozen=True)
class Row:
    """A value of the original code.

    Attributes:
      recipes: which have it.
      what: the probe that measures it.
      original: the value there.
      place: file and line, with a repository of ``REPOSITORIES``.
      ours: our value, if it is another one.
      header: the words in the recipe's header that say so.
    """

    recipes: str
    what: str
    original: Any
    place: str
    ours: Any = None
    header: str = ""


# Repositories and the commits that were read.
REPOSITORIES = {
    "v0.6": "mlcommons/training_results_v0.6 f312518, Google/benchmarks/resnet",
    "TF2": "mlcommons/training aa344c7, retired_benchmarks/resnet-tf2",
    "RCP": "mlcommons/logging 7bbf792, mlperf_logging/rcp_checker/training_4.0.0",
    "v4.0": "mlcommons/training_results_v4.0 6fe9543, Dell/benchmarks/resnet/implementations/mxnet",
    "tpu": "tensorflow/tpu 7dc921f, models/official/resnet",
    "amoeba": "tensorflow/tpu 7dc921f, models/official/amoeba_net",
    "ffcv": "libffcv/ffcv-imagenet 4dd291a",
    "fb": "facebookarchive/fb.resnet.torch 985e569",
    "paper": "papers",
    "examples": "mosaicml/examples a768bfc, resnet/recipes",
    "composer": "mosaicml/composer 20aad7e (v0.7.1), composer",
    "airbench": "KellerJordan/cifar10-airbench f1c599c",
    "speedrun": "hiverge/cifar10-speedrun 5cd49b1",
}
OF_06 = "v0.6 implementations/tpu-v3-2048-resnet/resnet/"

ROWS = [
    # --- Google's submission to MLPerf 0.6
    Row("mlperf_32k", "batch size", 32768, "v0.6 tpu-v3-2048/run_and_time.sh:20"),
    Row("mlperf_32k", "steps", 2983, "v0.6 tpu-v3-2048/run_and_time.sh:21"),
    # lr * epoch / 25 while epoch <= 25, at epochs of 1,281,167 images.
    Row("mlperf_32k", "last step of the warmup", 977, OF_06 + "lars_util.py:82,98"),
    Row("mlperf_32k", "rate at step 500", 31.2 * 500 * 32768 / IMAGES / 25, OF_06 + "lars_util.py:82"),
    Row("mlperf_32k", "rate at step 1500", 1e-4 + (31.2 - 1e-4) * (1 - 523 / 2007) ** 2, OF_06 + "lars_util.py:83-96"),
    # The loss has weight_decay / 2 * |w|^2, to whose gradient LARS adds weight_decay * w.
    Row("mlperf_32k", "decay of kernels", 1e-4 + 1e-4, OF_06 + "resnet_main.py:391; lars_util.py:112"),
    Row("mlperf_32k", "decay of gammas", 0.0, OF_06 + "resnet_main.py:393; lars_util.py:113"),
    Row(
        "mlperf_32k", "decay of biases", 1e-4, OF_06 + "resnet_main.py:391-393",
        ours=0.0, header="bias of the last layer has no weight decay",
    ),
    # Of a weight and a gradient of one direction, .5 and .1: the denominator has the norms of g + wd w
    # and wd w.
    Row("mlperf_32k", "trust ratio", 0.001 * 0.5 / (0.1 + 1e-4 * 0.5 + 1e-4 * 0.5 + 1e-5 / 108**0.5), OF_06 + "lars_util.py:109; run_and_time.sh:8"),
    Row("mlperf_32k google_tpu_pod_16k google_tpu_pod_32k", "rate in the momentum buffer", True, "TF2 tensorflow2/lars_optimizer.py:141, as contrib's LARSOptimizer"),
    Row("google_tpu_pod_16k google_tpu_pod_32k", "trust ratio", 0.001 * 0.5 / (0.1 + 1e-4 * 0.5), "tpu lars_util.py:92"),
    Row("mlperf_32k", "momentum and nesterov", (0.9, False), OF_06 + "resnet_main.py:221"),
    Row("mlperf_32k", "label smoothing", 0.1, "v0.6 tpu-v3-2048/run_and_time.sh:6"),
    Row("mlperf_32k", "gammas of last batch norms", 0.0, OF_06 + "resnet_model.py:421"),
    Row("mlperf_32k", "smallest crop, mean crop", (0.1, 0.387), OF_06 + "resnet_preprocessing.py:103-105"),
    Row("mlperf_32k", "resizing", ("bicubic", False), OF_06 + "resnet_preprocessing.py:107"),
    Row("mlperf_32k", "precision", "bfloat16", OF_06 + "resnet_main.py:213"),
    Row("mlperf_32k", "images in batch-norm statistics", 8 * 16, "v0.6 tpu-v3-2048/run_and_time.sh:2"),
    # --- Google's ResNet for TPUs
    *(
        Row(f"{google} mlperf_32k", what, original, place)
        for google in ("google_tpu_pod_4k google_tpu_pod_16k google_tpu_pod_32k",)
        for what, original, place in (
            ("initial convolutions", ("fan_in", 1.0, True), "tpu resnet_model.py:409"),
            ("padding of a stride", (1, 0), "tpu resnet_model.py:404"),
            ("padding of the stem's pool", (0, 1), "tpu resnet_model.py:753"),
            ("batch norm", (0.9, 1e-5), "tpu resnet_model.py:37-38"),
            ("black and white", (-2.117904, 2.2489083), "tpu resnet_main.py:235-236"),
            ("evaluation's crop of 500 x 375", (328, 328), "tpu resnet_preprocessing.py:119"),
        )
    ),
    Row("google_tpu_pod_4k", "steps", 28464, "tpu configs/cloud/v3-32.yaml:2"),
    Row("google_tpu_pod_16k", "steps", 7116, "tpu configs/cloud/v3-128.yaml:2"),
    Row("google_tpu_pod_32k", "steps", 3558, "tpu configs/cloud/v3-2048.yaml:2"),
    Row("google_tpu_pod_16k google_tpu_pod_32k", "decay of kernels", 1e-4, "tpu lars_util.py:95, resnet_main.py:471"),
    Row("google_tpu_pod_4k", "decay of kernels", 1e-4, "tpu resnet_main.py:474"),
    Row("google_tpu_pod_4k", "decay of biases", 1e-4, "tpu resnet_main.py:474"),
    Row("google_tpu_pod_4k", "momentum and nesterov", (0.9, True), "tpu resnet_main.py:500"),
    # --- MLPerf's TF2 reference
    Row("mlperf_4k", "steps", 42 * 312, "TF2 tensorflow2/common.py:639 (451: True); README.md:224"),
    Row("mlperf_4k", "last step of the warmup", 5 * 312, "TF2 tensorflow2/lars_util.py:112"),
    Row("mlperf_4k", "rate at step 780", 5.0, "TF2 tensorflow2/lars_util.py:151"),
    Row("mlperf_4k", "rate at step 3560", 1e-4 + (10 - 1e-4) * (1 - 2000 / 11545) ** 2, "TF2 tensorflow2/lars_util.py:114-125"),
    Row("mlperf_4k", "batch size", 4096, "TF2 README.md:200"),
    Row("mlperf_4k", "decay of kernels", 2e-4, "TF2 README.md:231; tensorflow2/resnet_runnable.py:284"),
    Row("mlperf_4k", "trust ratio", 0.001 * 0.5 / (0.1 + 2e-4 * 0.5), "TF2 tensorflow2/lars_optimizer.py:138-139"),
    Row("mlperf_4k mlperf_64k", "rate in the momentum buffer", True, "TF2 tensorflow2/lars_optimizer.py:141"),
    Row("mlperf_4k", "decay of biases", 0.0, "TF2 tensorflow2/resnet_runnable.py:284"),
    Row("mlperf_4k", "momentum and nesterov", (0.9, False), "TF2 README.md:233"),
    Row("mlperf_4k", "label smoothing", 0.1, "TF2 README.md:214"),
    Row("mlperf_4k", "precision", "float32", "TF2 README.md:206"),
    Row("mlperf_4k mlperf_64k", "initial convolutions", ("fan_in", 2.0, True), "TF2 tensorflow2/resnet_model.py:115"),
    Row("mlperf_4k mlperf_64k", "padding of a stride", (0, 1), "TF2 tensorflow2/resnet_model.py:215"),
    Row("mlperf_4k mlperf_64k", "padding of the stem's pool", (0, 1), "TF2 tensorflow2/resnet_model.py:318"),
    Row("mlperf_4k mlperf_64k", "batch norm", (0.9, 1e-5), "TF2 tensorflow2/resnet_model.py:40"),
    Row("mlperf_4k mlperf_64k", "gammas of last batch norms", 1.0, "TF2 tensorflow2/resnet_model.py:149"),
    Row("mlperf_4k mlperf_64k", "black and white", (-123.68, 131.32), "TF2 tensorflow2/imagenet_preprocessing.py:55"),
    Row("mlperf_4k mlperf_64k", "smallest crop, mean crop", (0.1, 0.387), "TF2 tensorflow2/imagenet_preprocessing.py:411-413"),
    Row("mlperf_4k mlperf_64k", "evaluation's crop of 500 x 375", (328, 328), "TF2 tensorflow2/imagenet_preprocessing.py:63,599"),
    Row("mlperf_4k mlperf_64k", "resizing", ("bilinear", False), "TF2 tensorflow2/imagenet_preprocessing.py:563"),
    # --- Google's convergence point
    Row("mlperf_64k", "batch size", 65536, "RCP rcps_resnet.json: resnet_ref_65536"),
    # 31 epochs of 1,281,167 images.
    Row("mlperf_64k", "last step of the warmup", 606, "RCP rcps_resnet.json: opt_learning_rate_warmup_epochs"),
    Row("mlperf_64k", "steps after the warmup, and 1", 1133, "RCP rcps_resnet.json: opt_learning_rate_decay_steps"),
    Row("mlperf_64k", "rate at step 606", 24.699, "RCP rcps_resnet.json: opt_base_learning_rate"),
    Row("mlperf_64k", "momentum and nesterov", (0.951807, False), "RCP rcps_resnet.json: opt_momentum"),
    Row("mlperf_64k", "decay of kernels", 1e-4, "RCP rcps_resnet.json: opt_weight_decay"),
    Row("mlperf_64k", "images in batch-norm statistics", 128, "RCP rcps_resnet.json: model_bn_span"),
    # --- NVIDIA's MXNet code
    Row("mlperf_3k", "batch size", 8 * 400, "v4.0 config_XE9680x8H100-SXM-80GB.sh:5"),
    Row("mlperf_3k", "steps", 37 * 401, "v4.0 common/fit.py:655; config_XE9680x8H100-SXM-80GB.sh:16"),
    Row("mlperf_3k", "last step of the warmup", 2 * 401, "v4.0 config_XE9680x8H100-SXM-80GB.sh:8"),
    Row("mlperf_3k", "rate at step 401", 5.5, "v4.0 config_XE9680x8H100-SXM-80GB.sh:7"),
    Row("mlperf_3k", "decay of kernels", 5e-5, "v4.0 config_XE9680x8H100-SXM-80GB.sh:11"),
    Row("mlperf_3k", "rate in the momentum buffer", False, "v4.0 common/optimizer.py:204-206"),
    Row("mlperf_3k", "trust ratio", 0.001 * 0.5 / (0.1 + 5e-5 * 0.5), "v4.0 config_XE9680x8H100-SXM-80GB.sh:13"),
    Row("mlperf_3k", "decay of gammas", 0.0, "v4.0 common/optimizer.py:126"),
    Row(
        "mlperf_3k", "decay of biases", 5e-5, "v4.0 common/optimizer.py:125",
        ours=0.0, header="also decays the bias of the last layer",
    ),
    Row("mlperf_3k", "momentum and nesterov", (0.9, False), "v4.0 config_XE9680x8H100-SXM-80GB.sh:12"),
    Row("mlperf_3k", "label smoothing", 0.1, "v4.0 config_XE9680x8H100-SXM-80GB.sh:14"),
    Row("mlperf_3k", "initial convolutions", ("fan_in", 2.0, False), "v4.0 train_imagenet.py:210"),
    Row("mlperf_3k", "padding of a stride", (1, 0), "v4.0 symbols/resnet-v1b-mainloop-fl.py:222"),
    Row("mlperf_3k", "padding of the stem's pool", (1, 0), "v4.0 symbols/resnet-v1b-mainloop-fl.py:378"),
    Row("mlperf_3k", "batch norm", (0.9, 1e-5), "v4.0 run_and_time.sh:138-139"),
    Row("mlperf_3k", "gammas of last batch norms", 1.0, "v4.0 train_imagenet.py:210"),
    Row("mlperf_3k", "black and white", (-2.117904, 2.2489083), "v4.0 common/dali.py:86-87"),
    Row("mlperf_3k", "smallest crop, mean crop", (0.05, 0.4175), "v4.0 common/dali.py:235; run_and_time.sh:130"),
    Row("mlperf_3k", "resizing", ("bilinear", True), "v4.0 common/dali.py:235, DALI's defaults"),
    Row("mlperf_3k", "evaluation's crop of 500 x 375", (328, 328), "v4.0 common/dali.py:336"),
    Row("mlperf_3k", "precision", "float16", "v4.0 run_and_time.sh:124"),
    # --- Google's AmoebaNet, with the flags' values
    Row("gpipe_amoebanet", "batch size", 256, "amoeba amoeba_net.py:97"),
    Row("gpipe_amoebanet", "steps", 48 * 5004, "amoeba amoeba_net.py:105; amoeba_net_model.py:235"),
    Row("gpipe_amoebanet", "rate at step 15012", 0.64 * 0.9**3, "amoeba amoeba_net.py:158-169"),
    Row("gpipe_amoebanet", "rate at step 100079", 0.64 * 0.9**19, "amoeba amoeba_net.py:158-169"),
    Row(
        "gpipe_amoebanet", "rate at step 7506", 0.64 / 2, "amoeba amoeba_net.py:175; model_builder.py:144",
        ours=0.64 * 0.9**3 / 2, header="here warmup ends at 0.467",
    ),
    Row(
        "gpipe_amoebanet", "decay of kernels", 4e-5, "amoeba amoeba_net.py:152",
        ours=4e-4, header="4e-4 is what a momentum of 0.9 accumulates",
    ),
    Row("gpipe_amoebanet", "batch norm", (0.9, 1e-5), "amoeba amoeba_net.py:134-136, over amoeba_net_model.py:112"),
    Row("gpipe_amoebanet", "clipping", None, "amoeba amoeba_net.py:178; amoeba_net_model.py:327"),
    # drop_connect_keep_prob is 1.
    Row("gpipe_amoebanet", "random layers", [], "amoeba amoeba_net.py:140"),
    Row("gpipe_amoebanet", "initial convolutions", ("fan_out", 2.0, True), "amoeba model_builder.py:264"),
    Row("gpipe_amoebanet", "initial last layer", ("fan_out", 2.0, True), "amoeba model_builder.py:264-268"),
    Row("gpipe_amoebanet", "label smoothing", 0.1, "amoeba amoeba_net_model.py:95"),
    Row("gpipe_amoebanet", "average of the weights", (0.9999, 1), "amoeba amoeba_net.py:163"),
    Row("gpipe_amoebanet", "precision", "bfloat16", "amoeba amoeba_net.py:190"),
    Row("gpipe_amoebanet", "smallest crop, mean crop", (0.1, 0.387), "amoeba inception_preprocessing.py:203,254"),
    Row("gpipe_amoebanet", "resizing", ("bilinear", False), "amoeba inception_preprocessing.py:273,332"),
    Row("gpipe_amoebanet", "evaluation's crop of 500 x 375", (438, 329), "amoeba inception_preprocessing.py:300,327"),
    Row("gpipe_amoebanet", "black and white", (-1.0, 1.0), "amoeba inception_preprocessing.py:389-390"),
    # Added to red, green and blue: brightness, and 1.402 Cr, -0.344 Cb - 0.714 Cr, 1.772 Cb.
    Row(
        "gpipe_amoebanet", "largest change of a grey",
        tuple(round(32 + 255 * 0.1 * part) for part in (1.402, 0.344136 + 0.714136, 1.772)),
        "amoeba inception_preprocessing.py:127-136",
    ),
    # --- MosaicML's mild recipe
    Row("mosaic_mild", "batch size", 2048, "examples resnet50_mild.yaml:64"),
    Row(
        "mosaic_mild", "sizes by epoch",
        [88] * 14 + [96, 104, 112, 116, 124, 132, 136, 144, 152, 160, 164, 172] + [176] * 6,
        "composer core/state.py:326; algorithms/progressive_resizing/progressive_resizing.py:214-226",
    ),
    Row("mosaic_mild", "rate at step 2500", 1.024, "examples resnet50_mild.yaml:51,62"),
    Row("mosaic_mild", "initial convolutions", ("fan_in", 2.0, False), "composer models/initializers.py:25"),
    Row("mosaic_mild", "decay of kernels", 5e-4 / 2.048, "examples resnet50_mild.yaml:54"),
    Row("mosaic_mild", "momentum and nesterov", (0.875, False), "examples resnet50_mild.yaml:52-53"),
    Row("mosaic_mild", "average of the weights", (0.5**0.01, 20), "examples resnet50_mild.yaml:9-11"),
    Row("mosaic_mild", "evaluation's crop of 500 x 375", (362, 362), "examples resnet50_mild.yaml:79,86"),
    Row("mosaic_mild", "precision", "float16", "examples resnet50_mild.yaml:55"),
    # --- ffcv-imagenet
    *(
        Row(f"{rn50} {rn18}", what, original, f"ffcv {place}")
        for rn50, rn18 in [("ffcv_rn50_16 ffcv_rn50_32 ffcv_rn50_88", "ffcv_rn18_16 ffcv_rn18_88")]
        for what, original, place in (
            ("momentum and nesterov", (0.9, False), "rn50_configs/rn50_16_epochs.yaml:24"),
            ("label smoothing", 0.1, "rn50_configs/rn50_16_epochs.yaml:23"),
            ("black and white", (-2.117904, 2.2489083), "train_imagenet.py:92"),
            ("evaluation's crop of 500 x 375", (328, 328), "train_imagenet.py:94"),
            ("smallest crop, mean crop", (0.08, 0.433), "train_imagenet.py:222, FFCV's defaults"),
            ("gammas of last batch norms", 1.0, "train_imagenet.py:334, torchvision's defaults"),
            ("initial convolutions", ("fan_out", 2.0, False), "train_imagenet.py:334, torchvision's defaults"),
            ("batch norm", (0.9, 1e-5), "train_imagenet.py:334, torchvision's defaults"),
            ("precision", "float16", "train_imagenet.py:366"),
        )
    ),
    Row("ffcv_rn50_16 ffcv_rn50_32 ffcv_rn50_88", "batch size", 8 * 512, "ffcv rn50_configs/rn50_16_epochs.yaml:5,19"),
    Row("ffcv_rn50_16 ffcv_rn50_32 ffcv_rn50_88", "decay of kernels", 1e-4, "ffcv rn50_configs/rn50_16_epochs.yaml:26"),
    Row("ffcv_rn50_16 ffcv_rn50_32 ffcv_rn50_88", "rate at step 624", 1.7, "ffcv rn50_configs/rn50_16_epochs.yaml:9"),
    Row("ffcv_rn18_16 ffcv_rn18_88", "batch size", 1024, "ffcv rn18_configs/rn18_16_epochs.yaml:22"),
    Row("ffcv_rn18_16 ffcv_rn18_88", "decay of kernels", 5e-5, "ffcv rn18_configs/rn18_16_epochs.yaml:29"),
    Row("ffcv_rn18_16 ffcv_rn18_88", "decay of biases", 5e-5, "ffcv train_imagenet.py:198"),
    Row("ffcv_rn18_16 ffcv_rn18_88", "rate at step 2502", 0.5, "ffcv rn18_configs/rn18_16_epochs.yaml:11"),
    # Names with "bn"; those of the projections' batch norms have none.
    Row("ffcv_rn18_16 ffcv_rn50_88", "decay of gammas", 0.0, "ffcv train_imagenet.py:197"),
    # --- Papers without code of their own
    Row("facebook_1h_256 facebook_1h_8k", "momentum and nesterov", (0.9, True), "paper Goyal et al. 2017: section 5.1"),
    # Its equation (10) with the correction that it asks for, which equals (9).
    Row("facebook_1h_256 facebook_1h_8k", "rate in the momentum buffer", False, "paper Goyal et al. 2017: section 3, remark 2"),
    Row("facebook_1h_256 facebook_1h_8k", "decay of kernels", 1e-4, "paper Goyal et al. 2017: section 5.1"),
    Row("facebook_1h_256 facebook_1h_8k", "decay of biases", 1e-4, "paper Goyal et al. 2017: section 5.1"),
    Row("facebook_1h_256 facebook_1h_8k", "decay of gammas", 0.0, "paper Goyal et al. 2017: section 5.3"),
    Row("facebook_1h_256 facebook_1h_8k", "gammas of last batch norms", 0.0, "paper Goyal et al. 2017: section 5.1"),
    Row("facebook_1h_256 facebook_1h_8k", "initial convolutions", ("fan_out", 2.0, False), "fb models/resnet.lua:169-170"),
    Row("facebook_1h_256 facebook_1h_8k", "resizing", ("bicubic", False), "fb datasets/transforms.lua:155"),
    Row("facebook_1h_256 facebook_1h_8k", "smallest crop, mean crop", (0.08, 0.433), "fb datasets/transforms.lua:138-147"),
    Row("facebook_1h_256 facebook_1h_8k", "black and white", (-2.117904, 2.2489083), "fb datasets/imagenet.lua:68-69"),
    Row("tencent_4min_resnet50", "decay of gammas", 0.0, "paper Jia et al. 2018: abstract"),
    Row("tencent_4min_resnet50", "decay of biases", 0.0, "paper Jia et al. 2018: abstract"),
    Row("tencent_4min_resnet50", "gammas of last batch norms", 0.0, "paper Jia et al. 2018: the authors' article"),
    Row("tencent_4min_resnet50", "initial convolutions", ("fan_in", 2.0, False), "paper Jia et al. 2018: the authors' article"),
    Row("tencent_4min_resnet50 tencent_4min_alexnet", "precision", "float16", "paper Jia et al. 2018: abstract"),
    Row("tencent_4min_alexnet", "decay of kernels", 5e-4, "paper You et al. 2017 (LARS): section 6"),
    Row("tencent_4min_resnet50", "decay of kernels", 1e-4, "RCP rcps_resnet.json: resnet_ref_65536"),
    Row("tencent_4min_resnet50", "momentum and nesterov", (0.951807, False), "RCP rcps_resnet.json: resnet_ref_65536"),
    # --- CIFAR-10
    Row("airbench_cifar10", "steps", 200, "airbench airbench94_muon.py:352"),
    Row("airbench_cifar10", "initial biases of the whitening", ("uniform", 12**-0.5), "airbench airbench94_muon.py:224,243"),
    Row("airbench_cifar10", "batch norm", (0.6, 1e-12), "airbench airbench94_muon.py:184"),
    Row("airbench_cifar10", "label smoothing", 0.2, "airbench airbench94_muon.py:399"),
    Row(
        "airbench_cifar10", "precision of the weights", "float16", "airbench airbench94_muon.py:238",
        ours="float32", header="weights and updates are float32",
    ),
    Row("speedrun_cifar10", "steps", 243, "speedrun cifar10_speedrun.py:627"),
    Row("speedrun_cifar10", "initial biases of the whitening", ("uniform", 12**-0.5), "speedrun cifar10_speedrun.py:425,444"),
    Row("speedrun_cifar10", "batch norm", (0.5566, 1e-12), "speedrun cifar10_speedrun.py:385"),
    Row("airbench96_cifar10", "initial biases of the whitening", ("zeros", 0.0), "airbench airbench96_faster.py:317"),
]  # fmt: skip


# --- Measuring what a run does

SHARED_OPTIONS = {field.name for field in dataclasses.fields(SharedOptions)}
NETWORK_OPTIONS = {field.name for field in dataclasses.fields(ModelOptions)} - SHARED_OPTIONS


@functools.lru_cache
def config_of(recipe: str) -> Config:
    return Config.from_flagfile(recipe)


def images_of(config: Config) -> int:
    return CIFAR10_IMAGES if config.data_on_device else IMAGES


def steps_per_epoch(config: Config) -> int:
    return images_of(config) // config.batch_size


def length(config: Config) -> int:
    return total_steps(config, steps_per_epoch(config))


def rate_at(config: Config, step: int) -> float:
    return float(build_schedule(config, steps_per_epoch(config))(step))


def step_of_the_highest_rate(config: Config) -> int:
    schedule = build_schedule(config, steps_per_epoch(config))
    steps = tf.range(length(config))
    each = tf.function(lambda: tf.map_fn(schedule, steps, fn_output_signature=tf.float32))
    return int(each().numpy().argmax())


def network(config: Config) -> keras.Model:
    """The recipe's network, of fewer channels, blocks and cells."""
    names = {*NETWORK_OPTIONS, "precision"} - {"proxy_model"}
    if config.batch_norm_batch_size:
        names.add("batch_size")
    kept = {name: getattr(config, name) for name in names}
    if config.model == "amoebanet_b":
        kept |= {"normal_cells": 3, "cell_filters": 16}
    elif config.model.startswith("resnet"):
        kept |= {"model": "resnet18", "width": 32}
    return built_network(Config(**kept))


@functools.lru_cache
def built_network(config: Config) -> keras.Model:
    keras.utils.set_random_seed(0)
    with precision_policy(config.precision):
        made, _ = build_network(config, 10, (64, 64, 3))
    return made


def layers_of(config: Config, kind: type) -> list[keras.layers.Layer]:
    return [layer for layer in network(config).submodules if isinstance(layer, kind)]


@functools.lru_cache
def stepped(config: Config, start: float, *gradients: float, later: bool = False) -> Any:
    """The run's optimizer, after steps with constant gradients.

    Args:
      later: whether the steps after the first are in the second half of the run.

    Returns:
      Before the first step and after each: a convolution's weight, a gamma, and the bias of the
      last layer, which all start at ``start``; the learning rate; and, if ``later``, that of the
      later steps.
    """
    pixels = keras.Input((8, 8, 3))
    inner = keras.Sequential(
        [
            keras.layers.Conv2D(4, 3, use_bias=False, input_shape=(8, 8, 3)),
            keras.layers.BatchNormalization(),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(10),
        ]
    )
    model = keras.Model(pixels, inner(pixels))
    optimizer = build_optimizer(config.replace(precision="float32"), model, steps_per_epoch(config))
    optimizer.build(model.trainable_variables)
    steps = [length(config) // 4, length(config) * 3 // 4 if later else length(config) // 4]
    watched = [model.trainable_variables[place] for place in (0, 1, 4)]
    for variable in model.trainable_variables:
        variable.assign(tf.fill(variable.shape, start))
    values = [np.array([variable.numpy().flat[0] for variable in watched], np.float64)]
    for count, gradient in enumerate(gradients):
        optimizer.iterations.assign(steps[min(count, 1)])
        optimizer.apply_gradients(
            [(tf.fill(v.shape, gradient), v) for v in model.trainable_variables]
        )
        values.append(np.array([variable.numpy().flat[0] for variable in watched], np.float64))
    return values, *(rate_at(config, step) for step in (steps if later else steps[:1]))


def momentum_and_nesterov(config: Config) -> tuple[float, bool]:
    values, rate = stepped(config, 0.0, 1.0, 0.0)
    first, second = (values[0] - values[1])[2] / rate, (values[1] - values[2])[2] / rate
    if abs(first - 1) < 1e-3:
        return second, False
    # With Nesterov's momentum m the first step has 1 + m, the second, without a gradient, m ** 2.
    return math.sqrt(second) if abs(math.sqrt(second) - (first - 1)) < 1e-3 else math.nan, True


def trust_ratio(config: Config) -> float:
    """The learning rate of LARS for a convolution's weights of 0.5 and gradients of 0.1, over the run's."""
    values, rate = stepped(config, 0.5, 0.1)
    return (values[0] - values[1])[0] / rate / (0.1 + decay(config, 0) * 0.5)


def rate_in_the_momentum(config: Config) -> bool:
    """Whether a gradient keeps the learning rate of its step when the learning rate changes."""
    (_, first, second), before, after = stepped(config, 0.0, 1.0, 0.0, later=True)
    momentum, nesterov = momentum_and_nesterov(config)
    kept = -(second - first)[2] / (momentum**2 if nesterov else momentum)
    assert min(abs(kept / rate - 1) for rate in (before, after)) < 1e-3 and before != after
    return abs(kept / before - 1) < abs(kept / after - 1)


def decay(config: Config, place: int) -> float:
    """What a step without a gradient takes from a weight, over weight and learning rate."""
    values, rate = stepped(config, 1000.0, 0.0)
    fraction = (values[0] - values[1])[place] / values[0][place] / rate
    momentum, nesterov = momentum_and_nesterov(config) if config.optimizer == "sgd" else (0, False)
    # Decay in the gradient has Nesterov's momentum, too.
    return fraction / (1 + momentum) if nesterov else fraction


def initial_weights(config: Config, kind: type) -> tuple[str, float, bool]:
    """The rule of layers' initial weights: fan, scale, and whether truncated."""
    kernels = [layer.kernel.numpy() for layer in layers_of(config, kind)]
    kernels = [kernel.reshape((1,) * (4 - kernel.ndim) + kernel.shape) for kernel in kernels]
    kernels = [kernel for kernel in kernels if kernel.size > 1000]

    def error(rule: tuple[str, float]) -> float:
        fans = {"fan_in": 2, "fan_out": 3}
        scales = [
            kernel.var() * kernel.shape[fans[rule[0]]] * kernel.shape[0] * kernel.shape[1]
            for kernel in kernels
        ]
        return float(np.abs(np.log(np.array(scales) / rule[1])).max())

    rules = [(fan, scale) for fan in ("fan_in", "fan_out") for scale in (1.0, 2.0)]
    best = min(rules, key=error)
    assert error(best) < 0.2, (best, error(best))
    truncated = {bool(np.abs(kernel).max() < 2.4 * kernel.std()) for kernel in kernels}
    assert len(truncated) == 1
    return (*best, truncated.pop())


def padding_of_a_stride(config: Config) -> tuple[int, int]:
    """The rows of zeros that the first and the last outputs of a 3x3 convolution of stride 2 see."""
    conv = network(config).get_layer("stage2_block1_conv1")
    before = network(config).get_layer("stage1_block2_relu").output
    if any(layer.name == "stage2_block1_conv1_blur" for layer in network(config).layers):
        raise AssertionError("a blur does the subsampling")
    part = keras.Model(before, conv.output)
    kept = conv.kernel.numpy()
    conv.kernel.assign(tf.ones_like(conv.kernel))
    outputs = tf.cast(part(tf.ones([1, *before.shape[1:]])), tf.float64).numpy()[0, :, 2, 0]
    outputs /= 3 * before.shape[-1]
    conv.kernel.assign(kept)
    return round(3 - outputs[0]), round(3 - outputs[-1])


def padding_of_the_pool(config: Config) -> tuple[int, int]:
    """Likewise of the stem's 3x3 max pool."""
    before = network(config).get_layer("stem_relu").output
    part = keras.Model(before, network(config).get_layer("stem_pool").output)
    height = before.shape[1]
    rows = tf.reshape(tf.range(1.0, height + 1), [1, height, 1, 1])
    ascending, descending = (
        tf.cast(part(tf.broadcast_to(values, [1, *before.shape[1:]])), tf.float32)[0, :, 2, 0]
        for values in (rows, height + 1 - rows)
    )
    return round(3 - float(ascending[0])), round(3 - float(descending[-1]))


def of_batch_norms(config: Config, *names: str) -> tuple[Any, ...]:
    (values,) = {
        tuple(getattr(layer, name) for name in names)
        for layer in layers_of(config, keras.layers.BatchNormalization)
    }
    return values


def last_gammas(config: Config) -> float:
    gammas = [
        layer.gamma.numpy()
        for layer in network(config).layers
        if layer.name.startswith("stage") and layer.name.endswith("block1_bn2")
    ]
    assert len(gammas) == 4
    (value,) = {float(value) for gamma in gammas for value in gamma}
    return value


def average_of_the_weights(config: Config) -> tuple[float, int]:
    """Decay a step, and steps between updates, of the run's moving average of the weights."""
    kept = {name: getattr(config, name) for name in ("ema_decay", "ema_every")}
    classifier = build_classifier(Config(model="resnet8", image_size=16, **kept), ["a", "b"])
    weight, average = classifier.weights[0], classifier.weight_average
    weight.assign(tf.zeros_like(weight))
    average.restart()
    weight.assign(tf.ones_like(weight))

    def gone(step: int) -> float:
        before = average.averages[0].numpy().flat[0]
        average.update(step)
        return (average.averages[0].numpy().flat[0] - before) / (1 - before)

    fraction = gone(0)
    every = next(step for step in range(1, 100) if gone(step))
    return (1 - fraction) ** (1 / every), every


def whitening_biases(config: Config) -> tuple[str, float]:
    (layer,) = (each for each in network(config).layers if each.name == "whitening")
    if not layer.bias.numpy().any():
        return "zeros", 0.0
    initializer = layer.bias_initializer
    many = type(initializer)(**initializer.get_config())([100_000]).numpy()
    assert np.abs(layer.bias.numpy()).max() <= np.abs(many).max() * 1.001
    # Of a uniform distribution, a fourth moment of 9/5 of the squared variance.
    assert (many**4).mean() / many.var() ** 2 == pytest.approx(1.8, rel=0.02)
    return "uniform", float(many.std() * math.sqrt(3))


def crop_areas(config: Config) -> tuple[float, float]:
    """The smallest and the mean fraction of 500 x 375 images that training's crops cover."""
    count = 16_000
    identities = tf.stack([tf.zeros([count], tf.int64)] * 2 + [tf.range(count, dtype=tf.int64)], 1)
    boxes = training_crop_boxes(tf.tile([[375, 500]], [count, 1]), identities, config).numpy()
    areas = boxes[:, 2] * boxes[:, 3] / (375 * 500)
    return float(areas.min()), float(areas.mean())


def resizing(config: Config) -> tuple[str, bool]:
    image = np.random.default_rng(0).integers(0, 256, [40, 50, 3], np.uint8)
    options = config.with_image_size(16).replace(cutout=0, resize_kernel="tensorflow")
    found = resize(tf.constant(image), options).numpy().astype(int)
    matching = [
        (method, antialias)
        for method in ("bilinear", "bicubic")
        for antialias in (False, True)
        if np.abs(
            found
            - np.clip(tf.image.resize(image, [16, 16], method, antialias=antialias).numpy(), 0, 255)
        ).max()
        <= 0.51
    ]
    (match,) = matching
    return match


def largest_changes_of_grey(config: Config) -> tuple[float, ...]:
    """By channel, the largest change of a grey pixel by training's augmentation."""
    count = 5000
    identities = tf.stack([tf.zeros([count], tf.int64)] * 2 + [tf.range(count, dtype=tf.int64)], 1)
    grey = tf.fill([1, 1, 3], tf.constant(128, tf.uint8))
    changed = tf.function(
        lambda: tf.map_fn(
            lambda changes: augment(grey, changes, config),
            draw_changes(identities, config),
            fn_output_signature=tf.uint8,
        )
    )()
    return tuple(np.abs(changed.numpy().astype(int) - 128).max(axis=(0, 1, 2)).tolist())


def black_and_white(config: Config) -> tuple[float, float]:
    normalize = PixelNormalization(config.pixel_mean, config.pixel_std)
    pixels = normalize(tf.constant([[[[0, 0, 0], [255, 255, 255]]]], tf.uint8)).numpy()
    return float(pixels[0, 0, 0, 0]), float(pixels[0, 0, 1, 0])


def label_smoothing(config: Config) -> float:
    logits = tf.constant([[2.0, 1.0, 0.0]])
    loss, certain, uniform = (
        float(image_losses(logits, tf.constant([0]), loss=config.loss, label_smoothing=s)[0])
        for s in (config.label_smoothing, 0.0, 1.0)
    )
    return (loss - certain) / (uniform - certain)


def sizes_by_epoch(config: Config) -> list[int]:
    an_epoch = steps_per_epoch(config)
    epochs = length(config) // an_epoch
    sizes = [
        {training_image_size(config, e * an_epoch + s, an_epoch) for s in (0, an_epoch - 1)}
        for e in range(epochs)
    ]
    return [size for (size,) in sizes]


def evaluation_crop(config: Config) -> tuple[int, int]:
    box = evaluation_crop_boxes(tf.constant([[500, 375]]), config.for_evaluation())
    return tuple(box.numpy()[0, 2:].tolist())


def clipping(config: Config) -> float | None:
    pixels = keras.Input((8, 8, 3))
    model = keras.Model(pixels, keras.layers.Dense(2)(keras.layers.Flatten()(pixels)))
    optimizer = build_optimizer(config.replace(precision="float32"), model, 100)
    return optimizer.global_clipnorm or optimizer.clipnorm


# Of random numbers: absolute.
TOLERANCES = {
    "smallest crop, mean crop": 0.006,
    "largest change of a grey": 5,
}
PROBES = {
    "batch size": lambda config: config.batch_size,
    "steps": length,
    "last step of the warmup": step_of_the_highest_rate,
    "steps after the warmup, and 1": lambda c: length(c) - step_of_the_highest_rate(c) + 1,
    "decay of kernels": lambda config: decay(config, 0),
    "decay of gammas": lambda config: decay(config, 1),
    "decay of biases": lambda config: decay(config, 2),
    "momentum and nesterov": momentum_and_nesterov,
    "trust ratio": trust_ratio,
    "rate in the momentum buffer": rate_in_the_momentum,
    "clipping": clipping,
    "label smoothing": label_smoothing,
    "average of the weights": average_of_the_weights,
    "precision": lambda c: layers_of(c, keras.layers.Conv2D)[0].compute_dtype,
    "precision of the weights": lambda c: layers_of(c, keras.layers.Conv2D)[0].kernel.dtype.name,
    "initial convolutions": lambda config: initial_weights(config, keras.layers.Conv2D),
    "initial last layer": lambda config: initial_weights(config, keras.layers.Dense),
    "initial biases of the whitening": whitening_biases,
    "padding of a stride": padding_of_a_stride,
    "padding of the stem's pool": padding_of_the_pool,
    "batch norm": lambda config: of_batch_norms(config, "momentum", "epsilon"),
    "images in batch-norm statistics": lambda c: of_batch_norms(c, "ghost_batch_size")[0],
    "gammas of last batch norms": last_gammas,
    "random layers": lambda config: [
        layer.name for layer in network(config).submodules if "drop" in type(layer).__name__.lower()
    ],
    "sizes by epoch": sizes_by_epoch,
    "smallest crop, mean crop": crop_areas,
    "evaluation's crop of 500 x 375": evaluation_crop,
    "resizing": resizing,
    "black and white": black_and_white,
    "largest change of a grey": largest_changes_of_grey,
}


@pytest.mark.parametrize(
    ("recipe", "row"),
    [
        pytest.param(recipe, row, id=f"{recipe}-{row.what}")
        for row in ROWS
        for recipe in row.recipes.split()
    ],
)
def test_a_run_does_what_the_original_code_does(recipe, row):
    config = config_of(recipe)
    if row.what.startswith("rate at step "):
        measured = rate_at(config, int(row.what.rpartition(" ")[2]))
    else:
        measured = PROBES[row.what](config)
    expected = row.original if row.ours is None else row.ours
    tolerance = TOLERANCES.get(row.what)
    if tolerance:
        np.testing.assert_allclose(measured, expected, rtol=0, atol=tolerance)
    elif isinstance(expected, (float, tuple)):
        assert close(measured, expected), (measured, expected)
    else:
        assert measured == expected


def close(measured: Any, expected: Any) -> bool:
    if isinstance(expected, tuple):
        return len(measured) == len(expected) and all(map(close, measured, expected))
    if isinstance(expected, float):
        return measured == pytest.approx(expected, rel=2e-3, abs=1e-9)
    return measured == expected


@pytest.mark.parametrize("row", [row for row in ROWS if row.header], ids=lambda row: row.what)
def test_the_header_says_what_differs(row):
    for recipe in row.recipes.split():
        header = find_recipe(recipe).read_text().split("\n\n")[0].replace("\n#", " ")
        assert row.header in " ".join(header.split()), recipe


def test_each_row_names_a_place():
    for row in ROWS:
        repository, path = row.place.split(maxsplit=1)
        assert repository in REPOSITORIES and (":" in path), row
        assert (row.ours is None) == (not row.header), row
