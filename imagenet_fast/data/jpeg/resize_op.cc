// An op that resizes a uint8 image to a uint8 square, and optionally flips it left to right.

#include <cstdint>

#include "native_ops.h"
#include "resize.h"

namespace {

struct Kernel {
  int size;
  resize::Function* resize;
};

void* CreateKernel(TF_OpKernelConstruction* construction) {
  const Status status(TF_NewStatus());
  int64_t size = 0;
  char method[16] = "";
  TF_OpKernelConstruction_GetAttrInt64(construction, "size", &size, status.get());
  if (IsOk(status)) {
    TF_OpKernelConstruction_GetAttrString(construction, "method", method, sizeof(method) - 1,
                                          status.get());
  }
  unsigned char antialias = 0;
  if (IsOk(status)) {
    TF_OpKernelConstruction_GetAttrBool(construction, "antialias", &antialias, status.get());
  }
  if (!IsOk(status)) TF_OpKernelConstruction_Failure(construction, status.get());
  return new Kernel{static_cast<int>(size), resize::ForMethod(method, antialias)};
}

void DeleteKernel(void* kernel) { delete static_cast<Kernel*>(kernel); }

void Resize(const Kernel& kernel, TF_OpKernelContext* context, const Status& status) {
  const Tensor image = Input(context, 0, status);
  if (!IsOk(status)) return;
  const Tensor flipped = Input(context, 1, status);
  if (!IsOk(status)) return;
  const Tensor box = Input(context, 2, status);
  if (!IsOk(status)) return;
  if (TF_NumDims(image.get()) != 3 || TF_Dim(image.get(), 2) != resize::kColors ||
      TF_TensorElementCount(image.get()) == 0 || TF_NumDims(flipped.get()) != 0) {
    TF_SetStatus(status.get(), TF_INVALID_ARGUMENT,
                 "image must be [height, width, 3] and not empty, flipped a scalar");
    return;
  }
  const int64_t height = TF_Dim(image.get(), 0), width = TF_Dim(image.get(), 1);
  const int64_t box_size = TF_TensorElementCount(box.get());
  const int32_t whole[] = {0, 0, static_cast<int32_t>(height), static_cast<int32_t>(width)};
  const int32_t* const part =
      box_size ? static_cast<const int32_t*>(TF_TensorData(box.get())) : whole;
  if ((box_size != 0 && box_size != 4) || part[0] < 0 || part[1] < 0 || part[2] < 1 ||
      part[3] < 1 || part[0] > height - part[2] || part[1] > width - part[3]) {
    TF_SetStatus(status.get(), TF_INVALID_ARGUMENT, "box must be [0] or [4] and inside of the image");
    return;
  }
  const int64_t shape[] = {kernel.size, kernel.size, resize::kColors};
  const size_t bytes = shape[0] * shape[1] * shape[2];
  const Tensor resized(
      TF_AllocateOutput(context, 0, TF_UINT8, shape, 3, bytes, status.get()));
  if (!IsOk(status)) return;
  const uint8_t* const first = static_cast<const uint8_t*>(TF_TensorData(image.get()));
  const resize::Image pixels = {first + (part[0] * width + part[1]) * resize::kColors, part[2], part[3],
                        static_cast<int>(width)};
  kernel.resize(pixels, kernel.size, *static_cast<const bool*>(TF_TensorData(flipped.get())),
                static_cast<uint8_t*>(TF_TensorData(resized.get())));
}

void Compute(void* kernel, TF_OpKernelContext* context) {
  const Status status(TF_NewStatus());
  Resize(*static_cast<const Kernel*>(kernel), context, status);
  if (!IsOk(status)) TF_OpKernelContext_Failure(context, status.get());
}

__attribute__((constructor)) void Register() {
  RegisterOp("ImagenetFastResize", {"image: uint8", "flipped: bool", "box: int32"},
             {"resized: uint8"},
             {"size: int >= 1", "method: {'bilinear', 'bicubic'}", "antialias: bool"}, UnknownShape,
             CreateKernel, Compute, DeleteKernel);
}

}  // namespace
