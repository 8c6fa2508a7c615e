// Ops that read records of TFRecord files.
//
// TensorFlow's reader allocates the length that a record claims before it reads: one that claims
// terabytes ends the process. And it copies each record several times on its way to a batch: where
// records are large, references to them are shuffled and batched instead, and read at last.

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "native_ops.h"
#include "tensorflow/core/lib/hash/crc32c.h"

namespace {

// A record's length and its checksum; and the checksum of its data.
constexpr int64_t kHeader = 12;
constexpr int64_t kFooter = 4;
// Smaller records, in bytes on average, cost less to copy than to read one by one.
constexpr int64_t kLarge = int64_t{1} << 13;

std::string ToString(const TF_TString* text) {
  return std::string(TF_TString_GetDataPointer(text), TF_TString_GetSize(text));
}

const TF_TString* Strings(const Tensor& tensor) {
  return static_cast<const TF_TString*>(TF_TensorData(tensor.get()));
}

class File {
 public:
  explicit File(const std::string& path)
      : number_(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {
    struct stat found;
    if (number_ >= 0 && fstat(number_, &found) == 0 && S_ISREG(found.st_mode)) size_ = found.st_size;
  }
  ~File() {
    if (number_ >= 0) close(number_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  bool IsOpen() const { return number_ >= 0; }
  // 0 if it is not a regular file.
  int64_t Size() const { return size_; }
  void ReadAhead() const { posix_fadvise(number_, 0, 0, POSIX_FADV_WILLNEED); }

  // Returns the number of bytes that were read, fewer only at the end of the file; -1: an error.
  int64_t Read(int64_t offset, int64_t size, void* to) const {
    int64_t done = 0;
    while (done < size) {
      const ssize_t now = pread(number_, static_cast<char*>(to) + done, size - done, offset + done);
      if (now < 0 && errno == EINTR) continue;
      if (now < 0) return -1;
      if (now == 0) break;
      done += now;
    }
    return done;
  }

 private:
  int number_;
  int64_t size_ = 0;
};

// Reads the length of the record at an offset; false if it does not fit into the file.
bool ReadLength(const File& file, int64_t offset, int64_t* length, uint32_t* checksum) {
  unsigned char header[kHeader];  // little-endian, as the machines that TensorFlow supports
  if (file.Read(offset, kHeader, header) != kHeader) return false;
  uint64_t claimed;
  std::memcpy(&claimed, header, sizeof(claimed));
  std::memcpy(checksum, header + sizeof(claimed), sizeof(*checksum));
  const int64_t rest = file.Size() - offset - kHeader - kFooter;
  if (rest < 0 || claimed > static_cast<uint64_t>(rest)) return false;
  *length = static_cast<int64_t>(claimed);
  return true;
}

uint32_t Checksum(const void* data, size_t size) {
  return tensorflow::crc32c::Mask(
      tensorflow::crc32c::Value(static_cast<const char*>(data), size));
}

// ---- Lengths -------------------------------------------------------------------------------------

// Returns the number of records, at most `count`, before the first that does not fit. Files that
// cannot be opened, as in a bucket, are the reader's to report.
int64_t CountFitting(const std::string& path, int64_t count) {
  const File file(path);
  if (!file.IsOpen()) return count;
  int64_t number = 0, length;
  uint32_t checksum;
  if (file.Size()) file.ReadAhead();
  for (int64_t offset = 0; number < count; ++number) {
    if (!ReadLength(file, offset, &length, &checksum)) break;
    offset += kHeader + length + kFooter;
  }
  return number;
}

// Inputs of both ops about a file; false: the status says why not.
bool ReadInputs(TF_OpKernelContext* context, const Status& status, std::string* path,
                int64_t* count) {
  const Tensor path_input = Input(context, 0, status);
  const Tensor count_input = IsOk(status) ? Input(context, 1, status) : nullptr;
  if (IsOk(status) && (TF_NumDims(path_input.get()) || TF_NumDims(count_input.get()))) {
    TF_SetStatus(status.get(), TF_INVALID_ARGUMENT, "path and count must be scalars");
  }
  if (!IsOk(status)) return false;
  *path = ToString(Strings(path_input));
  *count = *static_cast<const int64_t*>(TF_TensorData(count_input.get()));
  return true;
}

void ComputeFitting(void*, TF_OpKernelContext* context) {
  const Status status(TF_NewStatus());
  std::string path;
  int64_t count;
  if (ReadInputs(context, status, &path, &count)) {
    const Tensor fitting(
        TF_AllocateOutput(context, 0, TF_INT64, nullptr, 0, sizeof(int64_t), status.get()));
    if (IsOk(status)) {
      *static_cast<int64_t*>(TF_TensorData(fitting.get())) = CountFitting(path, count);
    }
  }
  if (!IsOk(status)) TF_OpKernelContext_Failure(context, status.get());
}

// ---- References ----------------------------------------------------------------------------------

// After a token, which no file can have, because each process draws another; before the path.
struct Reference {
  int64_t number;  // of the record in the file
  int64_t offset;  // of its header
  int64_t length;  // of its data
};

struct Kernel {
  std::string token;
  std::string wrong_checksum, too_short;  // reasons why a record is lost
  std::string lost;                       // the start of a note
  std::string failed;                     // the end of an error
};

void* Create(TF_OpKernelConstruction* construction) {
  const Status status(TF_NewStatus());
  auto kernel = std::make_unique<Kernel>();
  const struct {
    const char* name;
    std::string* value;
  } texts[] = {{"token", &kernel->token},
               {"lost", &kernel->lost},
               {"wrong_checksum", &kernel->wrong_checksum},
               {"too_short", &kernel->too_short},
               {"failed", &kernel->failed}};
  for (const auto& text : texts) {
    int32_t list = 0, size = 0;
    if (IsOk(status)) {
      TF_OpKernelConstruction_GetAttrSize(construction, text.name, &list, &size, status.get());
    }
    if (!IsOk(status)) break;
    text.value->resize(size);
    TF_OpKernelConstruction_GetAttrString(construction, text.name, &(*text.value)[0], size,
                                          status.get());
  }
  if (!IsOk(status)) TF_OpKernelConstruction_Failure(construction, status.get());
  return kernel.release();
}

void Delete(void* kernel) { delete static_cast<Kernel*>(kernel); }

// References to all records of a file of large records, of which only the data may be damaged; none to
// those of another file.
void RefersTo(const Kernel& kernel, TF_OpKernelContext* context, const Status& status) {
  std::string path;
  int64_t count;
  if (!ReadInputs(context, status, &path, &count)) return;
  std::vector<Reference> found;
  const File file(path);
  if (count > 0 && file.Size() / count >= kLarge) {
    file.ReadAhead();
    int64_t offset = 0, length;
    uint32_t checksum;
    for (int64_t number = 0; number < count && ReadLength(file, offset, &length, &checksum) &&
                             Checksum(&length, sizeof(length)) == checksum;
         ++number) {
      found.push_back({number, offset, length});
      offset += kHeader + length + kFooter;
    }
    if (static_cast<int64_t>(found.size()) < count) found.clear();
  }
  const int64_t shape[] = {static_cast<int64_t>(found.size())};
  const Tensor references(TF_AllocateOutput(context, 0, TF_STRING, shape, 1,
                                            shape[0] * sizeof(TF_TString), status.get()));
  if (!IsOk(status)) return;
  TF_TString* const texts = static_cast<TF_TString*>(TF_TensorData(references.get()));
  std::string text;
  for (size_t i = 0; i < found.size(); ++i) {
    text = kernel.token;
    text.append(reinterpret_cast<const char*>(&found[i]), sizeof(Reference));
    text += path;
    TF_TString_Copy(texts + i, text.data(), text.size());
  }
}

// Reads the record of a reference, or writes a note that it is lost; false: an error of the disk.
bool Load(const Kernel& kernel, const Reference& reference, const std::string& path,
          const File& file, TF_TString* record) {
  const std::string* reason = nullptr;
  const int64_t size = reference.length + kFooter;
  // Reserved at once, with room for the checksum, which is cut off below.
  char* const data = TF_TString_ResizeUninitialized(record, size);
  const int64_t got = file.IsOpen() ? file.Read(reference.offset + kHeader, size, data) : -1;
  if (got < 0) return false;
  if (got < size) {
    reason = &kernel.too_short;
  } else {
    uint32_t checksum;
    std::memcpy(&checksum, data + reference.length, sizeof(checksum));
    if (checksum != Checksum(data, reference.length)) reason = &kernel.wrong_checksum;
  }
  if (!reason) {
    TF_TString_Resize(record, reference.length, 0);
    return true;
  }
  const std::string note = kernel.lost + "\n" + std::to_string(reference.number) + "\n" +
                           std::to_string(reference.offset) + "\n" + *reason + "\n" + path;
  TF_TString_Copy(record, note.data(), note.size());
  return true;
}

struct Wanted {
  Reference reference;
  std::string path;
  TF_TString* record;
};

// The records of references; what is no reference stays. Each file is opened once.
void LoadRecords(const Kernel& kernel, TF_OpKernelContext* context, const Status& status) {
  const Tensor given = Input(context, 0, status);
  if (!IsOk(status)) return;
  if (TF_NumDims(given.get()) != 1) {
    return TF_SetStatus(status.get(), TF_INVALID_ARGUMENT, "records must be [length]");
  }
  const int64_t shape[] = {TF_Dim(given.get(), 0)};
  const Tensor loaded(TF_AllocateOutput(context, 0, TF_STRING, shape, 1,
                                        shape[0] * sizeof(TF_TString), status.get()));
  if (!IsOk(status)) return;
  TF_TString* const records = static_cast<TF_TString*>(TF_TensorData(loaded.get()));
  std::vector<Wanted> all;
  for (int64_t i = 0; i < shape[0]; ++i) {
    const TF_TString* const text = Strings(given) + i;
    const char* const begin = TF_TString_GetDataPointer(text);
    const size_t size = TF_TString_GetSize(text), head = kernel.token.size() + sizeof(Reference);
    if (size < head || std::memcmp(begin, kernel.token.data(), kernel.token.size()) != 0) {
      TF_TString_Copy(records + i, begin, size);
      continue;
    }
    all.push_back({{}, std::string(begin + head, size - head), records + i});
    std::memcpy(&all.back().reference, begin + kernel.token.size(), sizeof(Reference));
  }
  std::sort(all.begin(), all.end(), [](const Wanted& one, const Wanted& other) {
    return std::tie(one.path, one.reference.offset) < std::tie(other.path, other.reference.offset);
  });
  std::unique_ptr<File> file;
  const std::string* path = nullptr;
  for (const Wanted& wanted : all) {
    if (!path || *path != wanted.path) file = std::make_unique<File>(wanted.path);
    path = &wanted.path;
    if (!Load(kernel, wanted.reference, *path, *file, wanted.record)) {
      return TF_SetStatus(status.get(), TF_INTERNAL,
                          ("UserError: " + *path + kernel.failed).c_str());
    }
  }
}

template <void (*compute)(const Kernel&, TF_OpKernelContext*, const Status&)>
void Compute(void* kernel, TF_OpKernelContext* context) {
  const Status status(TF_NewStatus());
  compute(*static_cast<const Kernel*>(kernel), context, status);
  if (!IsOk(status)) TF_OpKernelContext_Failure(context, status.get());
}

__attribute__((constructor)) void Register() {
  RegisterOp("ImagenetFastCountFitting", {"path: string", "count: int64"}, {"fitting: int64"}, {},
             UnknownShape, nullptr, ComputeFitting, nullptr);
  const Specs attributes = {"token: string", "lost: string", "wrong_checksum: string",
                            "too_short: string", "failed: string"};
  RegisterOp("ImagenetFastReferToRecords", {"path: string", "count: int64"},
             {"references: string"}, attributes, UnknownShape, Create, Compute<RefersTo>, Delete);
  RegisterOp("ImagenetFastLoadRecords", {"given: string"}, {"records: string"}, attributes,
             UnknownShape, Create, Compute<LoadRecords>, Delete);
}

}  // namespace
