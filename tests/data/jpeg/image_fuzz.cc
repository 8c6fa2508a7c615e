// Makes batches of images from damaged records, as imagenet_fast/data/jpeg/image_ops.cc does. Every
// buffer is a block of the heap of just its size. A good image beside bad ones must be as it is alone.
// It is for AddressSanitizer, or ThreadSanitizer with several batches at a time. Build and run it:
//
//   tf=$(python -c 'import tensorflow as tf; print(tf.sysconfig.get_include())')
//   g++ -std=c++17 -O1 -g -mavx2 -mbmi2 -fsanitize=address,undefined -fno-sanitize-recover=all
//       -isystem$tf -isystem$tf/external/png -isystem$tf/external/libjpeg_turbo
//       -Iimagenet_fast/base -Iimagenet_fast/data/jpeg tests/data/jpeg/image_fuzz.cc -o image_fuzz
//       -L$tf/.. -l:libtensorflow_cc.so.2 -l:libtensorflow_framework.so.2 -Wl,-rpath,$tf/..
//   ASAN_OPTIONS=detect_leaks=0 ./image_fuzz SECONDS SEED BATCHES_AT_A_TIME RECORD...
//
// Each RECORD is a file of one tf.train.Example. It prints how many images were made and refused.

#include "jpeg_index.cc"  // its hashes are needed to forge them
#include "jpeg_cut.cc"
#include "jpeg_window.cc"
#include "resize.cc"
#include "image_ops.cc"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>

namespace {

using Record = std::vector<uint8_t>;
constexpr int kImages = 6;
constexpr int64_t kMostPixels = 1 << 20;

struct Counts {
  std::atomic<int64_t> unread{0}, made{0}, refused{0}, misfits{0}, same{0};
} counts;

struct Fuzzer {
  const std::vector<Record>& records;
  std::mt19937_64 generator;

  size_t Draw(size_t below) { return below ? generator() % below : 0; }
  bool OneIn(size_t number) { return Draw(number) == 0; }

  ImagesKernel Kernel() {
    const char* const methods[] = {"bilinear", "bicubic"};
    return {static_cast<int>(1 + Draw(40)), static_cast<int>(1 + Draw(4)),
            resize::ForMethod(methods[Draw(2)], OneIn(2)), kMostPixels, OneIn(2), OneIn(2), OneIn(2)};
  }

  // Changes bytes of a part.
  void Damage(uint8_t* part, size_t size, size_t head) {
    static const uint8_t kTelling[] = {0,    1,    2,    8,    10,   18,   26,   63,   127,  128,
                                       0xC0, 0xC4, 0xD0, 0xD9, 0xDA, 0xDD, 0xFF};
    for (size_t times = 1 + Draw(6); times && size; --times) {
      uint8_t& byte = part[Draw(OneIn(2) ? std::min(head, size) : size)];
      byte = OneIn(2) ? byte ^ 1 << Draw(8) : kTelling[Draw(sizeof kTelling)];
    }
  }

  // Gives the index the hashes of one that fits.
  void Forge(Bytes image, uint8_t* index, size_t size) {
    if (size < jpeg::kFixedBytes + jpeg::kHashBytes) return;
    const auto store = [index](size_t at, uint32_t value) {
      for (int i = 0; i < 4; ++i) index[at + i] = value >> 8 * i;
    };
    auto header = std::make_unique<jpeg::Header>();
    if (header->Parse(image) == jpeg::Result::kOk) {
      index[0] = jpeg::kVersion;
      store(2, image.size);
      store(6, jpeg::HashJpeg(image, *header));
    }
    store(size - jpeg::kHashBytes,
          jpeg::Hash({index, size - jpeg::kHashBytes}));
  }

  void Damage(Record* record) {
    example::Example read;
    if (OneIn(3) || !example::Read(record->data(), record->size(), true, true, &read)) {
      Damage(record->data(), record->size(), 100);  // the layout
      if (OneIn(3)) record->resize(Draw(record->size()));
      return;
    }
    uint8_t* const image = record->data() + (read.encoded.data - record->data());
    if (OneIn(2)) Damage(image, read.encoded.size, 700);
    if (!read.index.size) return;
    uint8_t* const index = record->data() + (read.index.data - record->data());
    if (OneIn(2)) Damage(index, read.index.size, 60);
    if (!OneIn(4)) Forge({image, read.encoded.size}, index, read.index.size);
  }

  Box DrawBox(const example::Example& read) {
    const auto part = [this](int64_t side) -> int64_t { return 1 + Draw(side); };
    Size size = {static_cast<int32_t>(read.height), static_cast<int32_t>(read.width)};
    bool is_cmyk;
    if (OneIn(2) && !ReadSize({read.encoded.data, read.encoded.size}, kMostPixels, &size, &is_cmyk)) {
      size = {100, 100};
    }
    if (!Fits(size, kMostPixels)) size = {100, 100};
    Box box;
    box.height = part(size.height);
    box.width = part(size.width);
    box.top = Draw(size.height - box.height + 1);
    box.left = Draw(size.width - box.width + 1);
    if (OneIn(30)) (&box.top)[Draw(4)] = static_cast<int32_t>(generator());
    return box;
  }

  void Batch() {
    const ImagesKernel kernel = Kernel();
    const size_t bytes = size_t{resize::kColors} * kernel.size * kernel.size;
    std::unique_ptr<uint8_t[]> copies[kImages];
    example::Example read[kImages];
    Box boxes[kImages];
    bool usual[kImages], damaged[kImages], flipped[kImages], made[kImages], misfits[kImages];
    for (int i = 0; i < kImages; ++i) {
      Record record = records[Draw(records.size())];
      damaged[i] = !OneIn(3);
      if (damaged[i]) Damage(&record);
      copies[i].reset(new uint8_t[record.size()]);
      std::copy(record.begin(), record.end(), copies[i].get());
      flipped[i] = OneIn(2);
      usual[i] = example::Read(copies[i].get(), record.size(), true, OneIn(2) || damaged[i], &read[i]);
      if (usual[i]) {
        boxes[i] = DrawBox(read[i]);
      } else {
        if (!damaged[i]) std::abort();
        ++counts.unread;
      }
    }
    const auto make = [&](int i, uint8_t* out) {
      return usual[i] &&
             MakeImage(kernel, {read[i].encoded.data, read[i].encoded.size},
                       {read[i].index.data, read[i].index.size}, boxes[i], flipped[i], out,
                       &misfits[i]);
    };
    const std::unique_ptr<uint8_t[]> images(new uint8_t[kImages * bytes]);
    pool::Run(kImages, kernel.threads, [&](int64_t i) { made[i] = make(i, images.get() + bytes * i); });
    for (int i = 0; i < kImages; ++i) {
      if (!usual[i]) continue;
      ++(made[i] ? counts.made : counts.refused);
      if (misfits[i]) ++counts.misfits;
      if (damaged[i] || !made[i]) continue;
      const std::unique_ptr<uint8_t[]> alone(new uint8_t[bytes]);
      if (!make(i, alone.get()) || std::memcmp(alone.get(), images.get() + bytes * i, bytes) != 0) {
        std::fprintf(stderr, "image %d differs from what it is alone\n", i);
        std::abort();
      }
      ++counts.same;
    }
  }
};

}  // namespace

int main(int count, char** arguments) {
  if (count < 5) return 2;
  const auto end = std::chrono::steady_clock::now() +
                   std::chrono::duration<double>(std::stod(arguments[1]));
  const uint64_t seed = std::stoull(arguments[2]);
  std::vector<Record> records;
  for (int i = 4; i < count; ++i) {
    std::FILE* const file = std::fopen(arguments[i], "rb");
    if (!file) return 2;
    Record data;
    for (int byte; (byte = std::fgetc(file)) != EOF;) data.push_back(byte);
    std::fclose(file);
    records.push_back(data);
  }
  std::vector<std::thread> threads;
  for (int i = 0; i < std::stoi(arguments[3]); ++i) {
    threads.emplace_back([&records, seed, i, end] {
      Fuzzer fuzzer{records, std::mt19937_64(seed + i)};
      while (std::chrono::steady_clock::now() < end) fuzzer.Batch();
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::printf("records not read: %ld\nimages refused: %ld\nindexes that do not fit: %ld\n"
              "images made: %ld\nof these, as alone: %ld\n",
              counts.unread.load(), counts.refused.load(), counts.misfits.load(),
              counts.made.load(), counts.same.load());
  std::fflush(stdout);
  std::_Exit(0);  // threads of the pool live as long as the process
}
