// A TensorFlow op, for tests, that decodes a window of an indexed JPEG; see jpeg_window.h.

#include <cstdint>
#include <vector>

#include "jpeg_window.h"
#include "native_ops.h"
#include "tensorflow/core/platform/ctstring.h"

namespace {

jpeg::Bytes ToBytes(const Tensor& tensor) {
  const auto* const text = static_cast<const TF_TString*>(TF_TensorData(tensor.get()));
  return {reinterpret_cast<const uint8_t*>(TF_TString_GetDataPointer(text)), TF_TString_GetSize(text)};
}

// The result of a window, and its pixels; the box must be in the image.
void Decode(TF_OpKernelContext* context, const Status& status) {
  Tensor inputs[3];
  for (int i = 0; i < 3; ++i) {
    inputs[i] = Input(context, i, status);
    if (!IsOk(status)) return;
  }
  const int32_t* const box = static_cast<const int32_t*>(TF_TensorData(inputs[2].get()));
  const int64_t shape[] = {box[2], box[3], 3};
  const Tensor result(
      TF_AllocateOutput(context, 0, TF_INT32, nullptr, 0, sizeof(int32_t), status.get()));
  if (!IsOk(status)) return;
  const Tensor pixels(TF_AllocateOutput(context, 1, TF_UINT8, shape, 3, shape[0] * shape[1] * 3,
                                        status.get()));
  if (!IsOk(status)) return;
  const jpeg::Window window = {box[0], box[1], box[2], box[3]};
  jpeg::IndexedJpeg indexed;
  jpeg::Result got = indexed.Open(ToBytes(inputs[0]), ToBytes(inputs[1]), window);
  if (got == jpeg::Result::kOk) {
    Buffer planes;
    got = jpeg::DecodeWindow(indexed, window, &planes,
                             static_cast<uint8_t*>(TF_TensorData(pixels.get())));
  }
  *static_cast<int32_t*>(TF_TensorData(result.get())) = static_cast<int32_t>(got);
}

void Compute(void*, TF_OpKernelContext* context) {
  const Status status(TF_NewStatus());
  Decode(context, status);
  if (!IsOk(status)) TF_OpKernelContext_Failure(context, status.get());
}

__attribute__((constructor)) void Register() {
  RegisterOp("ImagenetFastDecodeWindow", {"jpeg: string", "index: string", "box: int32"},
             {"result: int32", "pixels: uint8"}, {}, UnknownShape, nullptr, Compute, nullptr);
}

}  // namespace
