// safetensors: round trips, a file of the reference library, hostile files with their exact lines,
// and a fuzzer that mutates good files: HILT_FUZZ_COUNT=n for more of them, HILT_FUZZ_SEED=n for
// one.
#include "core/io/safetensors.h"
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include "core/random.h"
#include "core/storage.h"
#include "ops/ops.h"
#include "tests/support/error_of.h"
#include "tests/support/heap.h"
#include "tests/support/scale.h"
#include "tests/support/temporary.h"

namespace hilt {
namespace {

Temporary& temporary() {
  static Temporary t;
  return t;
}
std::string write(const std::vector<SafetensorsItem>& items, const SafetensorsMetadata& metadata = {}) {
  const std::string path = temporary().path("written.safetensors");
  write_safetensors(path, items, metadata);
  return path;
}
std::string content_of(const std::string& path) {
  return temporary().content(std::filesystem::path(path).filename().string());
}

std::string little_endian(std::uint64_t n) {
  std::string out(8, '\0');
  std::memcpy(out.data(), &n, 8);
  return out;
}
/// A file of this header and this many bytes of data.
std::string with_header(const std::string& json, std::size_t data = 0) {
  return little_endian(json.size()) + json + std::string(data, 'd');
}

std::vector<SafetensorsItem> some_items() {
  return {{"b.weight", randn({3, 4}, {1, 1})},
          {"a", randn({5}, {1, 2}, DType::f64)},
          {"half", randn({2, 2}, {1, 3}, DType::bf16)},
          {"other half", randn({3}, {1, 4}, DType::f16)},
          {"ids", arange(7)},
          {"small", arange(3, DType::i32)},
          {"flags", ones({2, 1}, DType::u8)},
          {"scalar", full({}, 2.5)},
          {"none", zeros({2, 0, 3})},
          {"\u00fc \"quoted\" \\ \n", ones({1})}};
}

TEST(Safetensors, RoundTripKeepsEveryByte) {
  const SafetensorsMetadata metadata{
      {"format", "hilt"}, {"empty", ""}, {"text", "a \"b\" \\ \n\t\x01 \u20ac \U0001f600"}};
  const std::vector<SafetensorsItem> items = some_items();
  const SafetensorsFile file(write(items, metadata));
  EXPECT_EQ(file.metadata(), metadata);
  ASSERT_EQ(file.entries().size(), items.size());
  EXPECT_TRUE(std::ranges::is_sorted(file.entries(), {}, &SafetensorsEntry::name));
  for (const SafetensorsItem& item : items) {
    const Tensor t = file.read(item.name);
    EXPECT_EQ(t.dtype(), item.tensor.dtype()) << item.name;
    ASSERT_EQ(t.shape(), item.tensor.shape()) << item.name;
    EXPECT_EQ(std::memcmp(t.raw(), item.tensor.raw(), t.bytes()), 0) << item.name;
  }
  std::uint64_t expected = safetensors_header(items, metadata).size();
  for (const SafetensorsItem& item : items) expected += item.tensor.bytes();
  EXPECT_EQ(file.bytes(), expected);
  EXPECT_EQ(file.bytes(), content_of(file.path()).size());
  EXPECT_EQ(file.find("absent"), nullptr);
  const SafetensorsFile none(write({}));
  EXPECT_EQ(none.entries().size(), 0u);
}

TEST(Safetensors, EqualInputGivesEqualBytes) {
  std::vector<SafetensorsItem> items = some_items();
  const std::string once = content_of(write(items, {{"k", "v"}}));
  std::ranges::reverse(items);
  EXPECT_EQ(content_of(write(items, {{"k", "v"}})), once);
  items[0].tensor = add(items[0].tensor, 1.0);
  EXPECT_NE(content_of(write(items, {{"k", "v"}})), once);
}

TEST(Safetensors, WritesWhatTheFormatSays) {
  const std::string file = content_of(write({{"b", full({2}, 1)}, {"a", full({1, 1}, 2, DType::u8)}}, {{"k", "v"}}));
  std::string json =
      R"({"__metadata__":{"k":"v"},"a":{"dtype":"U8","shape":[1,1],"data_offsets":[0,1]},"b":{"dtype":"F32","shape":[2],"data_offsets":[1,9]}})";
  json.resize(184, ' ');  // 8 + 184 is a multiple of 64
  EXPECT_EQ(file, little_endian(184) + json + std::string("\x02\0\0\x80\x3f\0\0\x80\x3f", 9));
}

TEST(Safetensors, WritesViews) {
  const Tensor x = randn({4, 6}, {1, 1}), view = transpose(slice(x, 1, 1, 6, 2));
  const SafetensorsFile file(write({{"view", view}}));
  EXPECT_EQ(file.read("view").to_vector(), view.to_vector());
  EXPECT_EQ(error_of([&] { (void)file.read("vjew"); }),
            "data: tensor (vjew): is not in the file, " + file.path() + ":0; did you mean view?");
}

TEST(Safetensors, ReadsWhatTheReferenceLibraryMayWrite) {
  // Blanks, any order of keys and tensors, escapes, BOOL, an empty tensor between others.
  const std::string header =
      "{\t\"x\\u00e9\\ud83d\\ude00\\/\" : { \"shape\" : [ 2 , 1 ] ,\"data_offsets\":[1,9],\"dtype\":\"F32\"},\r\n"
      "\"flag\":{\"dtype\":\"BOOL\",\"shape\":[],\"data_offsets\":[0,1]},\"void\":{\"dtype\":\"I64\",\"shape\":[3,0],"
      "\"data_offsets\":[9,9]},"
      "\"__metadata__\":{}}   ";
  const SafetensorsFile file(temporary().file(
      "reference.safetensors", little_endian(header.size()) + header + std::string("\x01\0\0\x80\x3f\0\0\0\x40", 9)));
  EXPECT_EQ(file.read("x\u00e9\U0001f600/").to_vector(), (std::vector<double>{1, 2}));
  EXPECT_EQ(file.read("flag").to_vector(), std::vector<double>{1});
  EXPECT_EQ(file.read("flag").dtype(), DType::u8);
  EXPECT_EQ(file.read("void").shape(), (Shape{3, 0}));
}

TEST(Safetensors, MovingAFileKeepsItOpenOnce) {
  SafetensorsFile a(write(some_items()));
  SafetensorsFile b(std::move(a));
  EXPECT_EQ(b.read("ids").to_vector(), arange(7).to_vector());
  a = std::move(b);
  EXPECT_EQ(a.read("ids").to_vector(), arange(7).to_vector());
}

// ---- hostile files ------------------------------------------------------------------------------

struct Hostile {
  std::string content, error;  // with FILE for the path
};

std::string entry(const std::string& name, const std::string& dtype, const std::string& shape,
                  const std::string& offsets) {
  return "\"" + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":[" + shape + "],\"data_offsets\":[" + offsets + "]}";
}
std::string x_entry(const std::string& shape, const std::string& offsets) { return entry("x", "U8", shape, offsets); }

std::string half_a_file() {
  std::string x = little_endian(1048640) + "{";
  x.resize(524288, ' ');
  return x;
}

std::vector<Hostile> hostile_files() {
  const std::string again = "write the file again with a safetensors library", copy = "copy or download the file again";
  const std::string convert = "convert it with the safetensors library where you trust its source";
  return {
      {"", "file (FILE): is empty, FILE:0; " + copy},
      {"1234567", "file (FILE): has 7 bytes, a header's length takes 8, FILE:0; " + copy},
      {half_a_file(), "header length (1048640): header says 1048640 bytes, file has 524288, FILE:0; " + copy},
      {little_endian(std::uint64_t{1} << 63) + "{}",
       "header length (9223372036854775808): at most 16777216 is allowed, FILE:0; is this a safetensors file?"},
      {little_endian(16777217) + "{}",
       "header length (16777217): at most 16777216 is allowed, FILE:0; is this a safetensors file?"},
      {little_endian(0), "header (its end): must begin with {, FILE:8; " + again},
      {"\x89PNG\r\n\x1a\n0123456789", "file (FILE): is a PNG image, FILE:0; give a .safetensors file"},
      {"PK\x03\x04_zip_zip_zip",
       "file (FILE): is a zip archive, as torch.save writes: refused, the pickles in it can run code, FILE:0; " +
           convert},
      {"\x80\x04\x95_pickle_pickle", "file (FILE): is a pickle: refused, pickles can run code, FILE:0; " + convert},
      {"\x80\x02}q\x01.", "file (FILE): is a pickle: refused, pickles can run code, FILE:0; " + convert},
      {"\x93NUMPY\x01\x00__________", "file (FILE): is a .npy file, FILE:0; it holds one tensor: use read_npy"},
      {"version https://git-lfs.github.com/spec/v1\n",
       "file (FILE): is a Git LFS pointer, not the file itself, FILE:0; run git lfs pull"},
      {"<!DOCTYPE html><html>",
       "file (FILE): is text, perhaps a web page saved in the file's place, FILE:0; download the file itself"},
      {"GGUF\x03___________", "file (FILE): is a GGUF file, FILE:0; " + convert},
      {with_header("[]"), "header ([): must begin with {, FILE:8; " + again},
      {with_header(" {}"), "header ( ): must begin with {, FILE:8; " + again},
      {with_header("{"), "tensor name (its end): expected a string, FILE:9; " + again},
      {with_header("{} x"), "header (x): only blanks may follow its last }, FILE:11; " + again},
      {with_header("{,}"), "tensor name (,): expected a string, FILE:9; " + again},
      {with_header("{\"x\":1}"), "header (1): expected {, FILE:13; " + again},
      {with_header("{\"x\":{\"dtype\":\"U8\""), "header (its end): expected , or }, FILE:26; " + again},
      {with_header("{\"x"), "tensor name (x): a quote that is not closed, FILE:9; " + again},
      {with_header("{\"x\ny\""), "tensor name (\\x0a): a control character in a string, FILE:11; " + again},
      {with_header("{\"\xff\":{}}"), "tensor name (\\xff): not UTF-8, FILE:10; " + again},
      {with_header("{\"\xc0\xaf\":{}}"), "tensor name (\\xc0): not UTF-8, FILE:10; " + again},
      {with_header("{\"\\q\":{}}"), "escape in a string (\\q): JSON has no such escape, FILE:10; " + again},
      {with_header("{\"\\u12g4\":{}}"),
       "escape in a string (g): expected four hexadecimal digits after \\u, FILE:14; " + again},
      {with_header("{\"\\ud800x\":{}}"), "escape in a string (\\ud800): half of a surrogate pair, FILE:10; " + again},
      {with_header("{\"\\udc00\":{}}"), "escape in a string (\\udc00): half of a surrogate pair, FILE:10; " + again},
      {with_header("{" + x_entry("1", "0,1") + "}", 0),
       "data_offsets of tensor x (0, 1): beyond the 0 bytes of tensors that the file has, FILE:55; " + copy},
      {with_header("{" + x_entry("1", "0,1") + "}", 3),
       "trailing bytes (2): the last tensor ends at byte 62, FILE:62; " + copy},
      {with_header("{}", 1), "trailing bytes (1): the last tensor ends at byte 10, FILE:10; " + copy},
      {with_header("{" + x_entry("2", "0,1") + "}", 1),
       "size of tensor x (u8[2]): takes 2 bytes, data_offsets span 1, FILE:9; " + again},
      {with_header("{" + x_entry("1", "1,0") + "}", 1),
       "data_offsets of tensor x (1, 0): the end is before the beginning, FILE:55; " + again},
      {with_header("{" + x_entry("-1", "0,1") + "}", 1),
       "shape of tensor x (-): expected a whole number that is not negative, FILE:36; " + again},
      {with_header("{" + x_entry("1.5", "0,1") + "}", 1),
       "shape of tensor x (1.): expected a whole number, FILE:36; " + again},
      {with_header("{" + x_entry("1e2", "0,1") + "}", 1),
       "shape of tensor x (1e): expected a whole number, FILE:36; " + again},
      {with_header("{" + x_entry("01", "0,1") + "}", 1),
       "shape of tensor x (01): a number may not begin with 0, FILE:36; " + again},
      {with_header("{" + x_entry("\"1\"", "0,1") + "}", 1),
       "shape of tensor x (\"): expected a whole number that is not negative, FILE:36; " + again},
      {with_header("{" + x_entry("1,", "0,1") + "}", 1),
       "shape of tensor x (]): expected a whole number that is not negative, FILE:38; " + again},
      {with_header("{" + x_entry("9223372036854775808", "0,1") + "}", 1),
       "shape of tensor x (9223372036854775808): exceeds 64 bits, FILE:36; " + again},
      {with_header("{" + x_entry("4294967296,0,4294967296", "0,0") + "}"),
       "shape of tensor x (4294967296): the product of the extents exceeds 64 bits, FILE:49; " + again},
      {with_header("{" + entry("x", "F64", "2305843009213693952", "0,0") + "}"),
       "size of tensor x (f64[2305843009213693952]): exceeds 64 bits, FILE:9; " + again},
      {with_header("{" + x_entry("1,1,1,1,1,1,1", "0,1") + "}", 1),
       "shape of tensor x (rank 7): at most 6 axes are supported, FILE:48; reshape the tensor and write the file "
       "again"},
      {with_header("{" + entry("x", "F8_E4M3", "1", "0,1") + "}", 1),
       "dtype of tensor x (F8_E4M3): expected one of F64 F32 BF16 F16 I64 I32 U8 BOOL, FILE:22; convert the tensor to "
       "one of these and write the file again"},
      {with_header("{\"x\":{\"dtype\":\"U8\",\"shape\":[]}}", 1), "tensor (x): lacks data_offsets, FILE:9; " + again},
      {with_header("{\"x\":{\"shape\":[],\"data_offsets\":[0,1]}}", 1), "tensor (x): lacks dtype, FILE:9; " + again},
      {with_header("{\"x\":{\"dtype\":\"U8\",\"data_offsets\":[0,1]}}", 1),
       "tensor (x): lacks shape, FILE:9; " + again},
      {with_header("{\"x\":{\"dtype\":\"U8\",\"dtype\":\"U8\"}}", 1),
       "key of tensor x (dtype): appears twice, FILE:27; " + again},
      {with_header("{\"x\":{\"type\":\"U8\"}}", 1),
       "key of tensor x (type): expected dtype, shape and data_offsets, FILE:14; " + again},
      {with_header("{" + x_entry("1", "0,1") + "," + entry("y", "U8", "1", "0,1") + "}", 1),
       "data_offsets of tensor y (0, 1): overlaps the tensor before it, which ends at 1, FILE:113; " + again},
      {with_header("{" + x_entry("1", "0,1") + "," + entry("y", "U8", "1", "2,3") + "}", 3),
       "data_offsets of tensor y (2, 3): leaves a hole, the tensor before it ends at 1, FILE:114; " + again},
      {with_header("{" + x_entry("1", "1,2") + "}", 2),
       "data_offsets of tensor x (1, 2): leaves a hole, the tensor before it ends at 0, FILE:61; " + again},
      {with_header("{" + x_entry("1", "0,1") + "," + x_entry("1", "1,2") + "}", 2),
       "tensor name (x): appears twice, FILE:113; " + again},
      {with_header("{\"__metadata__\":{},\"__metadata__\":{}}"),
       "key (__metadata__): appears twice, FILE:27; " + again},
      {with_header("{\"__metadata__\":{\"k\":\"v\",\"k\":\"v\"}}"),
       "metadata key (k): appears twice, FILE:33; " + again},
      {with_header("{\"__metadata__\":{\"k\":1}}"), "metadata value (1): expected a string, FILE:29; " + again},
      {with_header("{\"__metadata__\":{\"k\":{\"deep\":\"er\"}}}"),
       "metadata value ({): expected a string, FILE:29; " + again},
      {with_header(std::string(100000, '{')), "tensor name ({): expected a string, FILE:9; " + again},
  };
}

TEST(Safetensors, HostileFilesGetTheirLine) {
  for (const Hostile& h : hostile_files()) {
    const std::string path = temporary().file("hostile.safetensors", h.content);
    std::string error = error_of([&] { SafetensorsFile file(path); });
    for (std::size_t at = error.find(path); at != error.npos; at = error.find(path))
      error.replace(at, path.size(), "FILE");
    EXPECT_EQ(error, "data: " + h.error);
    EXPECT_EQ(std::ranges::count_if(error, [](unsigned char c) { return c < ' ' || c >= 0x7f; }), 0)
        << "not one printable line";
  }
}

TEST(Safetensors, OnlyRegularFilesAreRead) {
  const std::string directory = temporary().directory(), pipe = temporary().path("pipe"),
                    absent = temporary().path("absent");
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  const auto refused = [](const std::string& path) { return error_of([&] { SafetensorsFile file(path); }); };
  EXPECT_EQ(refused(directory),
            "data: file (" + directory + "): is a directory, " + directory + ":0; name a .safetensors file in it");
  EXPECT_EQ(refused(pipe),
            "data: file (" + pipe + "): is not a regular file, " + pipe + ":0; copy it to a regular file");
  EXPECT_EQ(refused("/dev/zero"),
            "data: file (/dev/zero): is not a regular file, /dev/zero:0; copy it to a regular file");
  EXPECT_EQ(refused(absent), "data: file (" + absent + "): No such file or directory, " + absent +
                                 ":0; check the name and its permissions");
}

TEST(Safetensors, NothingButAFileIsReplaced) {
  const std::string pipe = temporary().path("written");
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  for (const std::string& path : {pipe, std::string("/dev/null")})
    EXPECT_EQ(error_of([&] { write_safetensors(path, {}); }),
              "data: " + path + ": is not a regular file; refused to write a file in its place");
  EXPECT_TRUE(std::filesystem::is_fifo(pipe) && std::filesystem::is_character_file("/dev/null"));
}

TEST(Safetensors, AFileThatShrinksWhileOpenIsAnError) {
  const std::string path = write({{"x", zeros({1000})}});
  const SafetensorsFile file(path);
  ASSERT_EQ(::truncate(path.c_str(), 1000), 0);
  EXPECT_EQ(error_of([&] { (void)file.read("x"); }), "data: file (" + path + "): became shorter while it was read, " +
                                                         path + ":1000; wait until whoever writes it has finished");
}

TEST(Safetensors, RefusesToWriteWhatItWouldNotRead) {
  EXPECT_EQ(error_of([] {
              (void)safetensors_header(std::vector<SafetensorsItem>{{"x", ones({1})}, {"x", ones({1})}});
            }),
            "usage: safetensors: two tensors are called x");
  EXPECT_EQ(error_of([] {
              (void)safetensors_header(std::vector<SafetensorsItem>{{"__metadata__", ones({1})}});
            }),
            "usage: safetensors: a tensor may not be called __metadata__");
  EXPECT_EQ(error_of([] {
              (void)safetensors_header(std::vector<SafetensorsItem>{{"x", {}}});
            }),
            "usage: safetensors: tensor x is undefined");
  EXPECT_EQ(error_of([] {
              (void)safetensors_header(std::vector<SafetensorsItem>{{"\xff", ones({1})}});
            }),
            "usage: safetensors: '\\xff' is not UTF-8");
  EXPECT_EQ(error_of([] {
              write_safetensors("/proc/x.safetensors", std::vector<SafetensorsItem>{{"x", ones({1})}});
            }),
            "data: /proc/x.safetensors: cannot write: No such file or directory");
}

// ---- mutated files ------------------------------------------------------------------------------

/// One to four changes: a byte flipped or replaced by one that means something, a piece cut out,
/// doubled or moved, the length field changed.
std::string mutated(std::string file, std::mt19937_64& random) {
  const auto below = [&](std::size_t n) { return static_cast<std::size_t>(random() % n); };
  static constexpr std::string_view kTelling = "{}[]\",:0123456789-.eE\\u \n\x7f\x80\xff";
  for (std::size_t n = 1 + below(4); n > 0 && !file.empty(); --n) {
    const std::size_t at = below(std::min<std::size_t>(file.size(), below(8) ? 400 : file.size()));
    const std::size_t length = std::min(file.size() - at, 1 + below(40));
    switch (below(7)) {
      case 0: file[at] = static_cast<char>(file[at] ^ static_cast<char>(1 << below(8))); break;
      case 1:
      case 2: file[at] = kTelling[below(kTelling.size())]; break;
      case 3: file.erase(at, length); break;
      case 4: file.insert(at, file.substr(at, length)); break;
      case 5: file.insert(below(file.size()), file.substr(at, length)); break;
      case 6:
        if (file.size() < 8) break;
        std::uint64_t header = 0;
        std::memcpy(&header, file.data(), 8);
        header = below(2) ? header + below(65) - 32 : random() >> below(64);
        std::memcpy(file.data(), &header, 8);
    }
  }
  return file;
}

TEST(Safetensors, MutatedFilesNeverHarm) {
  std::vector<std::string> good;
  good.push_back(content_of(write(some_items(), {{"format", "hilt"}, {"\u20ac", "\\u"}})));
  good.push_back(content_of(write({{"x", ones({2, 3})}})));
  good.push_back(with_header("{\"x\\u00e9\":{\"shape\":[2,1],\"data_offsets\":[0,8],\"dtype\":\"F32\"}}", 8));
  for (const Hostile& h : hostile_files())
    if (h.content.size() < 1000 && !h.content.empty()) good.push_back(h.content);
  const int memory = ::memfd_create("fuzz", MFD_CLOEXEC);  // a file without a disk: a hundred times the runs
  ASSERT_GE(memory, 0);
  const std::string path = "/proc/self/fd/" + std::to_string(memory);
  const char *const one = std::getenv("HILT_FUZZ_SEED"), *const more = std::getenv("HILT_FUZZ_COUNT");
  const std::uint64_t first = one ? std::strtoull(one, nullptr, 10) : 1;
  const std::uint64_t asked = more ? std::strtoull(more, nullptr, 10) : 0;
  const std::uint64_t runs = one ? 1 : std::max(scaled<std::uint64_t>(30000, 2000), asked);
  std::uint64_t accepted = 0;
  for (std::uint64_t seed = first; seed < first + runs; ++seed) {
    SCOPED_TRACE("HILT_FUZZ_SEED=" + std::to_string(seed) + " replays it");
    std::mt19937_64 random(seed);
    const std::string file =
        mutated(good[static_cast<std::size_t>(random() % (random() % 2 ? 3 : good.size()))], random);
    ASSERT_EQ(::ftruncate(memory, 0), 0);
    ASSERT_EQ(::pwrite(memory, file.data(), file.size(), 0), static_cast<ssize_t>(file.size()));
    const std::int64_t before = heap::held;
    heap::most_held = before;
    reset_memory_peak();
    const std::size_t live = memory_stats().live;
    try {
      const SafetensorsFile opened(path);
      std::uint64_t bytes = 0;
      for (const SafetensorsEntry& e : opened.entries()) bytes += opened.read(e.name).bytes();
      ASSERT_LE(bytes, file.size());
      ++accepted;
    } catch (const Error& e) { ASSERT_EQ(e.code(), Code::data) << e.what(); }
    const std::int64_t used = heap::most_held - before + static_cast<std::int64_t>(memory_stats().peak - live);
    ASSERT_LE(used, static_cast<std::int64_t>(16 * file.size()) + (1 << 20)) << "file of " << file.size();
  }
  ::close(memory);
  std::printf("[ fuzz     ] safetensors: %llu mutated files, %llu of them still good\n",
              static_cast<unsigned long long>(runs), static_cast<unsigned long long>(accepted));
  if (one) return;
  EXPECT_GT(accepted, runs / 1000) << "the mutations are too wild to reach what lies behind the header";
  EXPECT_LT(accepted, runs / 2) << "the mutations change nothing";
}

TEST(Safetensors, LargeHeadersTakeLinearSpaceAndTime) {
  std::string json = "{";
  for (int i = 0; i < 100000; ++i)
    json += (i ? "," : "") + entry(std::to_string(i), "U8", "1", std::to_string(i) + "," + std::to_string(i + 1));
  const std::string path = temporary().file("large.safetensors", with_header(json + "}", 100000));
  const auto size = static_cast<std::int64_t>(json.size());
  const std::int64_t before = heap::held;
  heap::most_held = before;
  const SafetensorsFile large(path);
  EXPECT_EQ(large.entries().size(), 100000u);
  EXPECT_LE(heap::most_held - before, 16 * size + (1 << 20));
}

}  // namespace
}  // namespace hilt
