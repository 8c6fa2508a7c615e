// Indexes of JPEGs, with which the blocks around a window are found.
//
// A decoder must read a baseline JPEG's bits from the start: codes have variable lengths, and each block's
// DC coefficient is stored as the difference from the previous block's. The index has the position in the
// file and the DC coefficients at every few blocks, so the blocks around a window can be decoded
// (jpeg_window.h), or copied into a new JPEG (jpeg_cut.h), without those before them.
//
// Format of an index. Integers are little-endian. A "varint" has 7 bits per byte, lowest first; the highest
// bit is set in all bytes but the last.
//
//   1 byte    version, 1
//   1 byte    spacing: number of MCUs (minimum coded units) between points of a row
//   4 bytes   length of the JPEG in bytes
//   4 bytes   hash of the JPEG: FNV-1a, 32 bits, of its segments SOF0 or SOF1, DHT, DQT, APP0 and APP14, in
//             their order and including the markers, and then of 64 pieces of 8 bytes, spread evenly over
//             the file from its first byte to its last
//   points    at every `spacing` MCUs of each row of MCUs, at the row's end, at each restart marker and at
//             the end of the scan, in the order of the MCUs. Each consists of
//               varint    number of bits from the last point, or from the start of the scan, to the MCU
//                         after this point; after a restart marker, from the first bit after the marker.
//                         This includes the zero bytes that are stuffed after bytes of 255
//               varints   for each component, the DC coefficient before the MCU minus that of the last
//                         point (0 at the start and after a restart marker), times 2, or times -2 minus 1
//   4 bytes   hash of all previous bytes
//
// Sequential, Huffman-coded, 8-bit JPEGs of one scan and 1 or 3 components can be indexed.

#ifndef IMAGENET_FAST_JPEG_INDEX_H_
#define IMAGENET_FAST_JPEG_INDEX_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "jpeg_scan.h"

namespace jpeg {

// In pixels.
struct Window {
  int64_t top, left, height, width;
};

// A rectangle of MCUs; `last` numbers are exclusive.
struct Region {
  int64_t first_row, last_row, first_column, last_column;
};

// MCUs between two points of the index, which are contiguous in the JPEG.
struct Run {
  int64_t first, last;  // numbers of MCUs, the last exclusive
  Position start, end;
  int dc_before[kMostComponents], dc_after[kMostComponents];
};

// Makes the index of a JPEG.
Result MakeIndex(Bytes jpeg, std::vector<uint8_t>* index);

// A JPEG with its index.
//
// For any content of both, no other memory is accessed.
class IndexedJpeg {
 public:
  Bytes jpeg;
  Header header;

  // Reads the header; checks that the index is the JPEG's, and that the window is in the image.
  Result Open(Bytes jpeg, Bytes index, const Window& window);

  // Returns the MCUs that determine the window's pixels, from one point of each row to another.
  Region Around(const Window& window) const;

  // Calls `take` with the runs of a region in their order, until it does not return kOk.
  Result ForEachRun(const Region& region, const std::function<Result(const Run&)>& take) const;

 private:
  int spacing_;
  Bytes points_;
};

}  // namespace jpeg

#endif  // IMAGENET_FAST_JPEG_INDEX_H_
