// An op that counts the records of a TFRecord file that fit into it.
//
// TensorFlow's reader allocates the length that a record claims before it reads: one that claims
// terabytes ends the process.

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <string>

#include "native_ops.h"

namespace {

// A record's length and its checksum; and the checksum of its data.
constexpr int64_t kHeader = 12;
constexpr int64_t kFooter = 4;

// Returns the number of records, at most `count`, before the first that does not fit. Files that
// cannot be opened, as in a bucket, are the reader's to report.
int64_t CountFitting(const std::string& path, int64_t count) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file < 0) return count;
  struct stat found;
  int64_t number = 0;
  if (fstat(file, &found) == 0 && S_ISREG(found.st_mode)) {
    posix_fadvise(file, 0, 0, POSIX_FADV_WILLNEED);
    for (int64_t offset = 0; number < count; ++number) {
      uint64_t length;  // little-endian, as the machines that TensorFlow supports
      if (pread(file, &length, sizeof(length), offset) != sizeof(length)) break;
      const int64_t rest = found.st_size - offset - kHeader - kFooter;
      if (rest < 0 || length > static_cast<uint64_t>(rest)) break;
      offset += kHeader + static_cast<int64_t>(length) + kFooter;
    }
  }
  close(file);
  return number;
}

void Compute(void*, TF_OpKernelContext* context) {
  const Status status(TF_NewStatus());
  const Tensor path = Input(context, 0, status);
  const Tensor count = IsOk(status) ? Input(context, 1, status) : nullptr;
  if (IsOk(status) && (TF_NumDims(path.get()) || TF_NumDims(count.get()))) {
    TF_SetStatus(status.get(), TF_INVALID_ARGUMENT, "path and count must be scalars");
  }
  if (IsOk(status)) {
    const auto* const text = static_cast<const TF_TString*>(TF_TensorData(path.get()));
    const std::string name(TF_TString_GetDataPointer(text), TF_TString_GetSize(text));
    const Tensor fitting(TF_AllocateOutput(context, 0, TF_INT64, nullptr, 0, sizeof(int64_t),
                                           status.get()));
    if (IsOk(status)) {
      *static_cast<int64_t*>(TF_TensorData(fitting.get())) =
          CountFitting(name, *static_cast<const int64_t*>(TF_TensorData(count.get())));
    }
  }
  if (!IsOk(status)) TF_OpKernelContext_Failure(context, status.get());
}

__attribute__((constructor)) void Register() {
  RegisterOp("ImagenetFastCountFitting", {"path: string", "count: int64"}, {"fitting: int64"}, {},
             UnknownShape, nullptr, Compute, nullptr);
}

}  // namespace
