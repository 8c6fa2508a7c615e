// Indexes of JPEGs, with which crops can be cut out as smaller JPEGs without decoding pixels.
//
// A decoder must read a baseline JPEG's bits from the start: codes have variable lengths, and each block's
// DC coefficient is stored as the difference from the previous block's. The index has the position in the
// file and the DC coefficients at every few blocks, so the blocks around a window can be located and copied
// into a new JPEG, which decodes to the same pixels as the whole one.
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

#include <cstddef>
#include <cstdint>
#include <vector>

namespace jpeg_index {

struct Bytes {
  const uint8_t* data;
  size_t size;
};

enum class Result {
  kOk,
  kUnsupported,  // the JPEG cannot be indexed
  kCorrupt,      // the JPEG is damaged or truncated
  kBadIndex,     // the index is damaged or of another JPEG
  kBadWindow,    // the window is empty or not in the image
  kNoRoom,       // the output buffer is too small
};

// In pixels.
struct Window {
  int64_t top, left, height, width;
};

// Makes the index of a JPEG.
Result MakeIndex(Bytes jpeg, std::vector<uint8_t>* index);

// A JPEG of the blocks around a window.
struct Cut {
  size_t size;        // in bytes
  int64_t top, left;  // position of its first pixel in the image; multiples of 8
};

// Returns the maximum size of a cut of a JPEG of `size` bytes, slightly larger than it.
size_t MostCutBytes(size_t size);

// Cuts a window out of a JPEG.
//
// If the cut is decoded at 1/scale of its size (scale 1, 2, 4 or 8), all pixels of the window, with edges
// rounded to the nearest, equal those of the whole image decoded at the same scale: the cut has a margin
// for decoders that interpolate chroma.
//
// For any content of the JPEG and the index, memory other than these and `most` bytes at `out` is not
// accessed.
Result CutWindow(Bytes jpeg, Bytes index, const Window& window, int scale, uint8_t* out, size_t most,
                 Cut* cut);

}  // namespace jpeg_index

#endif  // IMAGENET_FAST_JPEG_INDEX_H_
