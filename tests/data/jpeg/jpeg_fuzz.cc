// Feeds damaged JPEGs and indexes to imagenet_fast/data/jpeg/jpeg_*.cc. Every buffer is a
// block of the heap of just its size, so that AddressSanitizer sees a byte too far. Build and run:
//
//   g++ -std=c++17 -O1 -g -mavx2 -mbmi2 -fsanitize=address,undefined -fno-sanitize-recover=all -fno-exceptions \
//       -I imagenet_fast/data/jpeg tests/data/jpeg/jpeg_fuzz.cc -o jpeg_fuzz
//   ./jpeg_fuzz SECONDS SEED JPEG...
//
// It prints how many calls ended with which result.

#include "jpeg_index.cc"  // its hashes are needed to forge them
#include "jpeg_cut.cc"
#include "jpeg_window.cc"

#include <chrono>
#include <cstdio>
#include <map>
#include <memory>
#include <random>
#include <string>

using jpeg::Bytes;
using jpeg::Result;
using Data = std::vector<uint8_t>;

std::mt19937_64 generator;
std::map<std::string, long> results;

size_t Draw(size_t below) { return below ? generator() % below : 0; }

// A copy of just its size.
class Exact {
 public:
  explicit Exact(const Data& data) : size_(data.size()), copy_(new uint8_t[data.size()]) {
    std::copy(data.begin(), data.end(), copy_.get());
  }
  Bytes bytes() const { return {copy_.get(), size_}; }

 private:
  size_t size_;
  std::unique_ptr<uint8_t[]> copy_;
};

// Changes bytes, most of them among the first `head`, which say more than the others.
Data Damage(Data data, size_t head) {
  static const uint8_t kTelling[] = {0,    1,    17,   34,   63,   127,  128,  0xC0, 0xC4,
                                     0xD0, 0xD3, 0xD7, 0xD9, 0xDA, 0xDD, 0xFF};
  if (Draw(6) == 0) {
    data.resize(Draw(data.size()));
    return data;
  }
  for (size_t times = 1 + Draw(8); times && !data.empty(); --times) {
    const size_t at = Draw(Draw(2) ? std::min(head, data.size()) : data.size());
    switch (Draw(4)) {
      case 0:
        data[at] ^= 1 << Draw(8);
        break;
      case 1:
        data[at] = kTelling[Draw(sizeof kTelling)];
        break;
      case 2:
        data.erase(data.begin() + at, data.begin() + std::min(data.size(), at + 1 + Draw(100)));
        break;
      case 3:
        data.insert(data.begin() + at, kTelling[Draw(sizeof kTelling)]);
        break;
    }
  }
  return data;
}

// Makes the index pass for one of a JPEG.
void Forge(const Data& jpeg, Data* index) {
  const auto store = [index](size_t at, uint32_t value) {
    for (int i = 0; i < 4; ++i) (*index)[at + i] = value >> 8 * i;
  };
  if (index->size() < jpeg::kFixedBytes + jpeg::kHashBytes) return;
  const Exact exact(jpeg);
  auto header = std::make_unique<jpeg::Header>();
  if (header->Parse(exact.bytes()) == Result::kOk) {
    (*index)[0] = jpeg::kVersion;
    store(2, jpeg.size());
    store(6, jpeg::HashJpeg(exact.bytes(), *header));
  }
  const size_t hashed = index->size() - jpeg::kHashBytes;
  store(hashed, jpeg::Hash({index->data(), hashed}));
}

Result Index(const Data& jpeg, Data* index) { return jpeg::MakeIndex(Exact(jpeg).bytes(), index); }

void Cut(const std::string& what, const Data& jpeg, const Data& index) {
  const Exact jpeg_copy(jpeg), index_copy(index);
  int64_t height = 400, width = 400;
  auto header = std::make_unique<jpeg::Header>();
  if (header->Parse(jpeg_copy.bytes()) == Result::kOk) {
    height = header->height;
    width = header->width;
  }
  jpeg::Window window;
  window.height = 1 + Draw(height);
  window.width = 1 + Draw(width);
  window.top = Draw(height - window.height + 1);
  window.left = Draw(width - window.width + 1);
  if (Draw(20) == 0) window.top = static_cast<int32_t>(generator());
  if (Draw(20) == 0) window.width = static_cast<int32_t>(generator());
  auto indexed = std::make_unique<jpeg::IndexedJpeg>();
  const Result opened = indexed->Open(jpeg_copy.bytes(), index_copy.bytes(), window);
  ++results["open, " + what + ": " + std::to_string(static_cast<int>(opened))];
  if (opened != Result::kOk) return;
  const size_t pixels = 3 * window.height * window.width;
  const std::unique_ptr<uint8_t[]> image(new uint8_t[pixels]);
  Buffer planes;
  const Result decoded = jpeg::DecodeWindow(*indexed, window, &planes, image.get());
  ++results["window, " + what + ": " + std::to_string(static_cast<int>(decoded))];
  const size_t most = Draw(10) ? jpeg::MostCutBytes(jpeg.size()) : Draw(jpeg.size());
  const std::unique_ptr<uint8_t[]> out(new uint8_t[most]);
  jpeg::Cut cut = {};
  const Result result = jpeg::CutWindow(*indexed, window, out.get(), most, &cut);
  ++results["cut, " + what + ": " + std::to_string(static_cast<int>(result))];
  if (result != Result::kOk) return;
  if (cut.size > most) __builtin_trap();
  // What was cut is a JPEG again.
  Data made(out.get(), out.get() + cut.size), again;
  ++results["index of a cut: " + std::to_string(static_cast<int>(Index(made, &again)))];
}

int main(int count, char** arguments) {
  if (count < 4) return 2;
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(std::stod(arguments[1]));
  generator.seed(std::stoull(arguments[2]));
  std::vector<Data> jpegs, indexes;
  for (int i = 3; i < count; ++i) {
    std::FILE* const file = std::fopen(arguments[i], "rb");
    if (!file) return 2;
    Data data;
    for (int byte; (byte = std::fgetc(file)) != EOF;) data.push_back(byte);
    std::fclose(file);
    Data index;
    if (Index(data, &index) != Result::kOk) return 2;
    jpegs.push_back(data);
    indexes.push_back(index);
  }
  while (std::chrono::steady_clock::now() < end) {
    const size_t number = Draw(jpegs.size());
    const Data& jpeg = jpegs[number];
    const Data& index = indexes[number];
    Cut("whole", jpeg, index);
    const Data damaged = Damage(jpeg, 700);
    Data its_index;
    const Result result = Index(damaged, &its_index);
    ++results["index of a damaged JPEG: " + std::to_string(static_cast<int>(result))];
    if (result == Result::kOk) Cut("damaged JPEG with its index", damaged, its_index);
    Cut("damaged JPEG with the whole one's index", damaged, index);
    Data forged = index;
    Forge(damaged, &forged);
    for (int i = 0; i < 3; ++i) Cut("damaged JPEG with that index forged", damaged, forged);
    Data bad = Damage(index, 60);
    Cut("damaged index", jpeg, bad);
    Forge(jpeg, &bad);
    for (int i = 0; i < 3; ++i) Cut("damaged index, forged", jpeg, bad);
  }
  long all = 0;
  for (const auto& [what, times] : results) {
    std::printf("%-60s %ld\n", what.c_str(), times);
    all += times;
  }
  std::printf("calls: %ld\n", all);
}
