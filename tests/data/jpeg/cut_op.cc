// A TensorFlow op, for tests, that cuts crops out of indexed JPEGs; see jpeg_cut.h.

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "jpeg_cut.h"
#include "native_ops.h"
#include "tensorflow/core/platform/ctstring.h"

namespace {

jpeg::Bytes ToBytes(const TF_TString* text) {
  return {reinterpret_cast<const uint8_t*>(TF_TString_GetDataPointer(text)),
          TF_TString_GetSize(text)};
}

const TF_TString* Strings(const Tensor& tensor) {
  return static_cast<const TF_TString*>(TF_TensorData(tensor.get()));
}

Tensor AllocateStrings(TF_OpKernelContext* context, int index, const std::vector<int64_t>& shape,
                       const Status& status) {
  int64_t count = 1;
  for (const int64_t size : shape) count *= size;
  return Tensor(TF_AllocateOutput(context, index, TF_STRING, shape.data(), shape.size(),
                                  count * sizeof(TF_TString), status.get()));
}

// Cuts of the images of a batch. Images that cannot be cut are returned unchanged.
void CutJpegs(TF_OpKernelContext* context, const Status& status) {
  Tensor inputs[3];
  for (int i = 0; i < 3; ++i) {
    inputs[i] = Input(context, i, status);
    if (!IsOk(status)) return;
  }
  const auto& [jpegs, indexes, boxes] = inputs;
  const int64_t count = TF_TensorElementCount(jpegs.get());
  if (TF_NumDims(jpegs.get()) != 1 || TF_TensorElementCount(indexes.get()) != count ||
      TF_TensorElementCount(boxes.get()) != 4 * count) {
    TF_SetStatus(status.get(), TF_INVALID_ARGUMENT,
                 "jpegs and indexes must be of one length, boxes [length, 4]");
    return;
  }
  const int64_t shape[] = {count, 4};
  const Tensor cuts = AllocateStrings(context, 0, {count}, status);
  if (!IsOk(status)) return;
  const Tensor cut_boxes(TF_AllocateOutput(context, 1, TF_INT32, shape, 2,
                                           4 * count * sizeof(int32_t), status.get()));
  if (!IsOk(status)) return;
  const Tensor were_cut(
      TF_AllocateOutput(context, 2, TF_BOOL, shape, 1, count * sizeof(bool), status.get()));
  if (!IsOk(status)) return;
  const Tensor misfits(
      TF_AllocateOutput(context, 3, TF_BOOL, shape, 1, count * sizeof(bool), status.get()));
  if (!IsOk(status)) return;
  const int32_t* box = static_cast<const int32_t*>(TF_TensorData(boxes.get()));
  TF_TString* const cut = static_cast<TF_TString*>(TF_TensorData(cuts.get()));
  int32_t* cut_box = static_cast<int32_t*>(TF_TensorData(cut_boxes.get()));
  bool* const was_cut = static_cast<bool*>(TF_TensorData(were_cut.get()));
  bool* const misfit = static_cast<bool*>(TF_TensorData(misfits.get()));
  std::vector<uint8_t> buffer;
  for (int64_t i = 0; i < count; ++i, box += 4, cut_box += 4) {
    const jpeg::Bytes jpeg = ToBytes(Strings(jpegs) + i);
    const jpeg::Bytes index = ToBytes(Strings(indexes) + i);
    jpeg::Bytes bytes = jpeg;
    jpeg::Cut made = {};
    was_cut[i] = misfit[i] = false;
    if (index.size) {
      buffer.resize(std::max(buffer.size(), jpeg::MostCutBytes(jpeg.size)));
      const jpeg::Window window = {box[0], box[1], box[2], box[3]};
      jpeg::IndexedJpeg indexed;
      jpeg::Result result = indexed.Open(jpeg, index, window);
      if (result == jpeg::Result::kOk) {
        result = jpeg::CutWindow(indexed, window, buffer.data(), buffer.size(), &made);
      }
      was_cut[i] = result == jpeg::Result::kOk;
      misfit[i] = result == jpeg::Result::kBadIndex;
      if (was_cut[i]) bytes = {buffer.data(), made.size};
    }
    TF_TString_Copy(cut + i, reinterpret_cast<const char*>(bytes.data), bytes.size);
    cut_box[0] = box[0] - (was_cut[i] ? made.top : 0);
    cut_box[1] = box[1] - (was_cut[i] ? made.left : 0);
    cut_box[2] = box[2];
    cut_box[3] = box[3];
  }
}

template <void (*compute)(TF_OpKernelContext*, const Status&)>
void Compute(void*, TF_OpKernelContext* context) {
  const Status status(TF_NewStatus());
  compute(context, status);
  if (!IsOk(status)) TF_OpKernelContext_Failure(context, status.get());
}

__attribute__((constructor)) void Register() {
  RegisterOp("ImagenetFastCutJpegs",
             {"jpegs: string", "indexes: string", "boxes: int32"},
             {"cuts: string", "cut_boxes: int32", "were_cut: bool", "misfits: bool"}, {}, UnknownShape, nullptr,
             Compute<CutJpegs>, nullptr);
}

}  // namespace
