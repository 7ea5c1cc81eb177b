// Files byte for byte as NumPy writes them; truncated and broken files refused, whatever their
// headers say; writers that leave a whole file or none.
#include "core/io/npy.h"
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>
#include <algorithm>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <random>
#include <thread>
#include "core/random.h"
#include "tests/support/error_of.h"
#include "tests/support/scale.h"
#include "tests/support/temporary.h"

namespace hilt {
namespace {

using Numbers = std::vector<double>;
using Names = std::vector<std::string>;

/// A file as NumPy writes it: a header of any text, padded, and data.
std::string npy(const std::string& dictionary, const std::string& data, int version = 1) {
  const std::size_t before = version == 1 ? 10 : 12;
  std::string header = dictionary;
  while ((before + header.size() + 1) % 64 != 0) header += ' ';
  header += '\n';
  std::string out("\x93NUMPY");
  out += static_cast<char>(version);
  out += '\0';
  for (std::size_t i = 0, n = header.size(); i < before - 8; ++i, n >>= 8) out += static_cast<char>(n & 255);
  return out + header + data;
}
std::string dictionary(const std::string& descr, const std::string& shape, const std::string& fortran = "False") {
  return "{'descr': '" + descr + "', 'fortran_order': " + fortran + ", 'shape': " + shape + ", }";
}
template <class T> std::string bytes(std::initializer_list<T> values) {
  return std::string(reinterpret_cast<const char*>(values.begin()), values.size() * sizeof(T));
}

Temporary& temporary() {
  static Temporary t;
  return t;
}
Tensor read(const std::string& content) { return read_npy(temporary().file("x.npy", content)); }
/// The error of reading a file of that content, after its path.
std::string refused(const std::string& content) {
  const std::string path = temporary().file("x.npy", content), error = error_of([&] { (void)read_npy(path); });
  if (!error.starts_with("data: " + path + ": ")) return error;
  EXPECT_EQ(std::count_if(error.begin(), error.end(), [](unsigned char c) { return c < ' ' || c >= 0x7f; }), 0)
      << "not one printable line";
  return error.substr(6 + path.size() + 2);
}

// ---- what NumPy writes --------------------------------------------------------------------------

// Python: np.save(f, np.array([[1, 2, 3], [4, 5, 6]], np.int32)); open(f, 'rb').read()
const std::string kFromNumPy =
    std::string("\x93NUMPY\x01\x00v\x00{'descr': '<i4', 'fortran_order': False, 'shape': (2, 3), }", 69) +
    std::string(58, ' ') + "\n" + std::string("\1\0\0\0\2\0\0\0\3\0\0\0\4\0\0\0\5\0\0\0\6\0\0\0", 24);

TEST(Npy, ReadsAndWritesTheBytesThatNumPyWrites) {
  ASSERT_EQ(kFromNumPy.size(), 128u + 24u);
  const Tensor x = read(kFromNumPy);
  EXPECT_EQ(to_string(x), "[[1, 2, 3],\n [4, 5, 6]] i32[2, 3]");
  EXPECT_TRUE(x.is_contiguous());
  const Temporary t;
  write_npy(t.path("x.npy"), x);
  EXPECT_EQ(t.content("x.npy"), kFromNumPy);
  EXPECT_EQ(t.names(), Names{"x.npy"});
}

TEST(Npy, WritesShapesAsPythonDoes) {
  const Temporary t;
  const auto header = [&](const Shape& shape) {
    write_npy(t.path("x.npy"), zeros(shape, DType::u8));
    const std::string all = t.content("x.npy");
    const std::size_t length = static_cast<unsigned char>(all[8]) + 256u * static_cast<unsigned char>(all[9]);
    EXPECT_EQ((10 + length) % 64, 0u);
    EXPECT_EQ(all[10 + length - 1], '\n');
    EXPECT_EQ(all.size(), 10 + length + static_cast<std::size_t>(shape.numel()));
    return all.substr(10, all.find('}') - 9);
  };
  EXPECT_EQ(header({}), "{'descr': '|u1', 'fortran_order': False, 'shape': (), }");
  EXPECT_EQ(header({3}), "{'descr': '|u1', 'fortran_order': False, 'shape': (3,), }");
  EXPECT_EQ(header({3, 0}), "{'descr': '|u1', 'fortran_order': False, 'shape': (3, 0), }");
  EXPECT_EQ(header({1, 2, 3, 4, 5, 6}), "{'descr': '|u1', 'fortran_order': False, 'shape': (1, 2, 3, 4, 5, 6), }");
}

TEST(Npy, EveryTypeRankAndLayoutComesBack) {
  const Temporary t;
  const std::string path = t.path("x.npy");
  for (DType type : {DType::f64, DType::f32, DType::f16, DType::i64, DType::i32, DType::u8})
    for (const Shape& shape : {Shape{}, {1}, {7}, {0}, {2, 3}, {4, 0, 2}, {1, 2, 1, 3, 1, 2}, {100, 3000}}) {
      Tensor x = empty(shape, type);
      std::byte* const raw = x.mutable_raw();
      for (std::size_t i = 0; i < x.bytes(); ++i)
        raw[i] = static_cast<std::byte>(i * 37 + i / 251);  // NaN payloads too
      write_npy(path, x);
      const Tensor y = read_npy(path);
      ASSERT_EQ(y.dtype(), type);
      ASSERT_EQ(y.shape(), shape);
      ASSERT_EQ(std::memcmp(x.raw(), y.raw(), x.bytes()), 0) << type << shape;
    }
  const Tensor x = arange(24, DType::f32);
  for (const Tensor& view : {as_strided(x, {4, 3}, {1, 8}, 0), as_strided(x, {2, 2}, {0, 5}, 3),
                             as_strided(x, {}, {}, 23), as_strided(x, {5}, {1}, 7)}) {
    write_npy(path, view);
    EXPECT_EQ(read_npy(path).to_vector(), view.to_vector());
    EXPECT_EQ(read_npy(path).shape(), view.shape());
  }
}

TEST(Npy, ReadsVersionsTwoAndThree) {
  for (int version : {1, 2, 3})
    EXPECT_EQ(read(npy(dictionary("<f4", "(2,)"), bytes({1.5f, 2.5f}), version)).to_vector(), Numbers({1.5, 2.5}));
}

TEST(Npy, ReadsFortranOrderByStrides) {
  const std::string six = bytes({1., 2., 3., 4., 5., 6.});
  const Tensor x = read(npy(dictionary("<f8", "(2, 3)", "True"), six));
  EXPECT_EQ(x.shape(), (Shape{2, 3}));
  EXPECT_EQ(x.to_vector(), Numbers({1, 3, 5, 2, 4, 6}));
  EXPECT_EQ(x.stride(0), 1);
  EXPECT_EQ(x.stride(1), 2);
  EXPECT_EQ(read(npy(dictionary("<f8", "(1, 2, 3)", "True"), six)).to_vector(), Numbers({1, 3, 5, 2, 4, 6}));
  EXPECT_EQ(read(npy(dictionary("<f8", "(6,)", "True"), six)).to_vector(), Numbers({1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(read(npy(dictionary("<f8", "()", "True"), bytes({7.}))).item(), 7);
  EXPECT_EQ(read(npy(dictionary("<f8", "(3, 0, 2)", "True"), "")).shape(), (Shape{3, 0, 2}));
}

TEST(Npy, ReadsAnyOrderOfKeysQuotesAndBlanks) {
  const std::string one = bytes({std::int64_t{5}});
  for (const char* text : {"{'descr': '<i8', 'fortran_order': False, 'shape': (1,), }",
                           "{'shape': (1,), 'descr': '<i8', 'fortran_order': False}",
                           "{\"fortran_order\":False,\"shape\":(1,),\"descr\":\"<i8\"}",
                           "  {  'shape'  :  (  1  ,  )  ,  'fortran_order' : False, 'descr':'<i8'  ,  }  \n ",
                           "{'descr': '<i8',\n'fortran_order': True, 'shape': (1,),}"})
    EXPECT_EQ(read(npy(text, one)).item(), 5) << text;
  EXPECT_EQ(read(npy(dictionary("<u1", "(1,)"), "\5")).item(), 5);
  EXPECT_EQ(read(npy(dictionary("|u1", "(1, 1,)"), "\5")).item(), 5);
}

TEST(Npy, ReadsThroughALinkButWritesInItsPlace) {
  const Temporary t;
  const std::string target = t.path("target.npy"), link = t.path("link.npy");
  write_npy(target, arange(3));
  std::filesystem::create_symlink(target, link);
  EXPECT_EQ(read_npy(link).numel(), 3);
  write_npy(link, arange(5));
  EXPECT_EQ(read_npy(link).numel(), 5);
  EXPECT_EQ(read_npy(target).numel(), 3);
}

// ---- what is no .npy file -----------------------------------------------------------------------

TEST(NpyRefuses, WhatCannotBeRead) {
  const Temporary t;
  const auto error = [&](const std::string& path) { return error_of([&] { (void)read_npy(path); }); };
  const std::string missing = t.path("missing.npy"), fifo = t.path("fifo");
  EXPECT_EQ(error(missing), "data: " + missing + ": cannot open: No such file or directory");
  EXPECT_EQ(error(t.directory()), "data: " + t.directory() + ": is a directory; expected a .npy file");
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  EXPECT_EQ(error(fifo),
            "data: " + fifo + ": is not a regular file; expected a .npy file");  // at once: nobody writes to it
  EXPECT_EQ(error("/dev/zero"), "data: /dev/zero: is not a regular file; expected a .npy file");
  EXPECT_EQ(refused(""), "is empty; expected a .npy file");
}

TEST(NpyRefuses, OtherKindsOfFilesByName) {
  EXPECT_EQ(refused(std::string("\x89PNG\r\n\x1a\n\0\0\0\rIHDR", 16)), "is a PNG picture; expected a .npy file");
  EXPECT_EQ(refused(std::string("\x80\4\x95\x1f\0\0\0", 7)), "is a pickle: refused, pickles can run code");
  EXPECT_EQ(refused(std::string("PK\3\4\x14\0\0\0", 8)),
            "is a zip archive, an .npz perhaps; expected a .npy file: in NumPy, np.save each array");
  EXPECT_EQ(refused("1, 2, 3\n"), "is not a .npy file: byte 0 begins '1, 2, ', expected '\\x93NUMPY'");
  EXPECT_EQ(refused("\x93NUMPI"), "is not a .npy file: byte 0 begins '\\x93NUMPI', expected '\\x93NUMPY'");
  EXPECT_EQ(refused("x"), "is not a .npy file: byte 0 begins 'x', expected '\\x93NUMPY'");
}

TEST(NpyRefuses, OtherVersions) {
  std::string file = kFromNumPy;
  file[6] = 4;
  EXPECT_EQ(refused(file), "version 4.0 at byte 6; expected 1.0, 2.0 or 3.0");
  file[6] = 1, file[7] = 1;
  EXPECT_EQ(refused(file), "version 1.1 at byte 6; expected 1.0, 2.0 or 3.0");
  file[6] = '\xff', file[7] = '\xff';
  EXPECT_EQ(refused(file), "version 255.255 at byte 6; expected 1.0, 2.0 or 3.0");
}

TEST(NpyRefuses, EveryTruncation) {
  for (std::size_t n = 1; n < kFromNumPy.size(); ++n) {
    const std::string says = std::to_string(n < 8 ? 8 : n < 10 ? 10 : n < 128 ? 128 : 152);
    ASSERT_EQ(refused(kFromNumPy.substr(0, n)),
              "truncated: header says " + says + " bytes, file has " + std::to_string(n));
  }
  for (int version : {2, 3}) {
    const std::string file = npy(dictionary("<f4", "(2,)"), bytes({1.f, 2.f}), version);
    for (std::size_t n = 1; n < file.size(); ++n)
      ASSERT_EQ(refused(file.substr(0, n)).substr(0, 10), "truncated:") << n;
  }
}

TEST(NpyRefuses, TrailingBytes) {
  EXPECT_EQ(refused(kFromNumPy + "x"), "trailing bytes at byte 152: header says 152 bytes, file has 153");
  EXPECT_EQ(refused(npy(dictionary("<f4", "(0,)"), "abcd")),
            "trailing bytes at byte 128: header says 128 bytes, file has 132");
}

TEST(NpyRefuses, HeadersTooLongForAnything) {
  const std::string start("\x93NUMPY\2\0", 8);
  EXPECT_EQ(refused(start + "\xff\xff\xff\xff" + std::string(100, ' ')),
            "a header of 4294967295 bytes at byte 8; expected 65536 at most");
  EXPECT_EQ(refused(start + std::string("\1\0\1\0", 4) + std::string(70000, ' ')),
            "a header of 65537 bytes at byte 8; expected 65536 at most");
  EXPECT_EQ(refused(start + std::string("\0\0\1\0", 4) + std::string(70000, ' ')),
            "bad header at byte 65548: expected '{', got its end");
  EXPECT_EQ(refused(std::string("\x93NUMPY\1\0\xff\xff", 10)), "truncated: header says 65545 bytes, file has 10");
  EXPECT_EQ(refused(std::string("\x93NUMPY\1\0\0\0", 10)), "bad header at byte 10: expected '{', got its end");
}

// ---- headers ------------------------------------------------------------------------------------

TEST(NpyRefuses, TypesItDoesNotHave) {
  const auto with = [](const std::string& descr) { return refused(npy(dictionary(descr, "(1,)"), bytes({1.}))); };
  for (const char* objects : {"|O", "O", "<O8"})
    EXPECT_EQ(with(objects), "bad header at byte 20: type '" + std::string(objects) +
                                 "' holds pickled objects: refused, pickles can run code");
  EXPECT_EQ(with(">f8"),
            "bad header at byte 20: type '>f8' is big endian; expected little endian: in NumPy, "
            "x.astype(x.dtype.newbyteorder('<'))");
  const auto instead = [](const char* type, const char* one) {
    return "bad header at byte 20: type '" + std::string(type) +
           "'; expected one of <f8 <f4 <f2 <i8 <i4 |u1: in NumPy, x.astype('" + one + "') for one";
  };
  for (const char* other : {"<c8", "<U3", "|S1", "=f8", "f8", "<f16", "", "<f88", "<M8[ns]"})
    EXPECT_EQ(with(other), instead(other, "<f4"));
  for (const char* whole : {"|b1", "<u4", "<i2", "|i1"}) EXPECT_EQ(with(whole), instead(whole, "<i8"));
  EXPECT_EQ(refused(npy("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (1,), }", bytes({1.f}))),
            "bad header at byte 20: records of several types are refused; expected one plain type");
}

TEST(NpyRefuses, BadHeadersNamingTheByte) {
  const std::pair<const char*, const char*> cases[] = {
      {"", "191: expected '{', got its end"},
      {"[1]", "10: expected '{', got '['"},
      {"{", "191: expected a string in quotes, got its end"},
      {"{}", "12: the header lacks descr"},
      {"{'descr': '<f8'}", "26: the header lacks fortran_order"},
      {"{'descr': '<f8', 'fortran_order': False}", "50: the header lacks shape"},
      {"{'descr': '<f8', 'fortran_order': False, }", "52: the header lacks shape"},
      {"{descr: '<f8'}", "11: expected a string in quotes, got 'd'"},
      {"{'descr", "11: a quote that is not closed"},
      {"{'descr\": '<f8'}", "21: expected ':', got '<'"},
      {"{'descr' '<f8'}", "19: expected ':', got '''"},
      {"{'descr': <f8}", "20: expected a string in quotes, got '<'"},
      {"{'descr': '<f8", "20: a quote that is not closed"},
      {"{'descr': '<f8' 'shape': (1,)}", "26: expected '}', got '''"},
      {"{'descr': '<f8', 'fortran_order': 0", "44: expected True or False, got '0'"},
      {"{'descr': '<f8', 'fortran_order': false", "44: expected True or False, got 'f'"},
      {"{'descr': '<f8', 'fortran_order': Tru", "44: expected True or False, got 'T'"},
      {"{'descr': '<f8', 'fortran_order': Falsehood", "49: expected '}', got 'h'"},
      {"{'descr': '<f8', 'descr': '<f8'}",
       "27: key 'descr' is unknown or repeated; expected descr, fortran_order and shape, each once"},
      {"{'shape': (1,), 'shape': (1,)}",
       "26: key 'shape' is unknown or repeated; expected descr, fortran_order and shape, each once"},
      {"{'fortran_order': True, 'fortran_order': True}",
       "34: key 'fortran_order' is unknown or repeated; expected descr, fortran_order and shape, each once"},
      {"{'color': 3}", "11: key 'color' is unknown or repeated; expected descr, fortran_order and shape, each once"},
      {"{'shape': 1}", "20: expected '(', got '1'"},
      {"{'shape': [1]}", "20: expected '(', got '['"},
      {"{'shape': (1)}", "22: expected ',': a shape of one axis is written (1,)"},
      {"{'shape': (,)}", "21: expected an extent, got ','"},
      {"{'shape': (1,,)}", "23: expected an extent, got ','"},
      {"{'shape': (1 2)}", "23: expected ',' or ')', got '2'"},
      {"{'shape': (1", "191: expected ',' or ')', got its end"},
      {"{'shape': (1,", "191: expected an extent, got its end"},
      {"{'shape': (1, -2)}", "24: Shape: extent -2 of axis 1 is negative"},
      {"{'shape': (+1,)}", "21: expected an extent, got '+'"},
      {"{'shape': (1.5,)}", "22: expected ',' or ')', got '.'"},
      {"{'shape': (1e3,)}", "22: expected ',' or ')', got 'e'"},
      {"{'shape': (3L,)}", "22: expected ',' or ')', got 'L'"},
      {"{'shape': (True,)}", "21: expected an extent, got 'T'"},
      {"{'shape': (1, 2, 3, 4, 5, 6, 7)}", "39: Shape: rank exceeds 6"},
      {"{'shape': (9223372036854775808,)}", "21: an extent beyond 64 bits"},
      {"{'shape': (-9223372036854775809,)}", "21: an extent beyond 64 bits"},
      {"{'shape': (4611686018427387904, 2)}", "42: Shape: 4611686018427387904 x 2 overflows 64 bits"},
      {"{'shape': (0, 4611686018427387904, 2)}", "45: Shape: 4611686018427387904 x 2 overflows 64 bits"},
      {"{'descr': '<f8', 'fortran_order': False, 'shape': (1,)} x",
       "66: expected blanks to the end of the header, got 'x'"},
      {"{'descr': '<f8', 'fortran_order': False, 'shape': (1,)}}",
       "65: expected blanks to the end of the header, got '}'"},
      {"{'descr': '<f8', 'fortran_order': False, 'shape': (1,)\t}", "64: expected '}', got '\\x09'"},
      {"\x1b[31m{", "10: expected '{', got '\\x1b'"},
      {"{'\xff\n\xc3\xa9': 1}",
       "11: key '\\xff\\x0a\\xc3\\xa9' is unknown or repeated; expected descr, fortran_order and shape, each once"},
  };
  for (const auto& [text, error] : cases) {
    std::string header = text;
    header.resize(181, ' ');  // so that the header ends at byte 191
    std::string file = std::string("\x93NUMPY\1\0\xb5\0", 10) + header + bytes({1.});
    EXPECT_EQ(refused(file), std::string("bad header at byte ") + error) << text;
  }
}

TEST(NpyRefuses, LongNamesAreCutInMessages) {
  const std::string error = refused(npy("{'" + std::string(5000, 'x') + "': 1}", ""));
  EXPECT_EQ(error, "bad header at byte 11: key '" + std::string(40, 'x') +
                       "..' is unknown or repeated; expected descr, fortran_order and shape, each once");
}

TEST(NpyRefuses, SizesBeyondTheFileBeforeAnyMemoryIsAsked) {
  const std::size_t before = memory_stats().live;
  reset_memory_peak();
  EXPECT_EQ(refused(npy(dictionary("<f8", "(1000000000000,)"), bytes({1.}))),
            "truncated: header says 8000000000128 bytes, file has 136");
  EXPECT_EQ(refused(npy(dictionary("<f8", "(1000000, 1000000)"), bytes({1.}))),
            "truncated: header says 8000000000128 bytes, file has 136");
  EXPECT_EQ(refused(npy(dictionary("<f8", "(4611686018427387904,)"), bytes({1.}))),
            "truncated: header says more bytes than 64 bits count, f64[4611686018427387904], file has 136");
  EXPECT_EQ(refused(npy(dictionary("|u1", "(9223372036854775807,)"), bytes({1.}))),
            "truncated: header says more bytes than 64 bits count, u8[9223372036854775807], file has 136");
  EXPECT_EQ(memory_stats().peak, before);
}

TEST(NpyFuzz, BrokenFilesAreRefusedOrReadWithinTheirSize) {
  std::mt19937 random(1);
  const std::string seeds[] = {kFromNumPy, npy(dictionary("<f4", "(2, 3)", "True"), std::string(24, 'd')),
                               npy(dictionary("<f8", "()"), std::string(8, 'd'), 2),
                               npy("{'shape': (3, 0, 5), 'fortran_order': False, 'descr': \"<f2\"}", "", 3)};
  const std::string alphabet = "{}()[]'\",: \nTrueFalse0123456789<|>fiuOb-+.e\\\x93\xff";
  int read_well = 0;
  const int rounds = scaled(600000, 2000);
  constexpr std::size_t kMost = 4096;
  const int memory = ::memfd_create("fuzz", MFD_CLOEXEC);  // a file without a disk, and written to without a call
  ASSERT_EQ(::ftruncate(memory, kMost), 0);
  void* const mapped = ::mmap(nullptr, kMost, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
  ASSERT_NE(mapped, MAP_FAILED);
  const std::string path = "/proc/self/fd/" + std::to_string(memory);
  for (int round = 0; round < rounds; ++round) {
    std::string file = seeds[random() % std::size(seeds)];
    for (unsigned edits = 1 + random() % 4; edits > 0 && !file.empty(); --edits) {
      const std::size_t at = random() % std::min<std::size_t>(file.size(), random() % 4 ? 80 : 1000);
      switch (random() % 5) {
        case 0: file[at] = static_cast<char>(random()); break;
        case 1: file[at] = alphabet[random() % alphabet.size()]; break;
        case 2: file.insert(at, 1, alphabet[random() % alphabet.size()]); break;
        case 3: file.erase(at, 1 + random() % 3); break;
        default: file.resize(random() % (file.size() + 10));
      }
    }
    ASSERT_LE(file.size(), kMost);
    ASSERT_EQ(::ftruncate(memory, static_cast<off_t>(file.size())), 0);
    if (!file.empty()) std::memcpy(mapped, file.data(), file.size());  // of an empty file there is no page
    const std::size_t live = memory_stats().live;
    reset_memory_peak();
    const std::string error = error_of([&] {
      const Tensor x = read_npy(path);
      (void)x.to_vector();  // every element can be reached
      ++read_well;
    });
    ASSERT_TRUE(error == "nothing" || error.starts_with("data: " + path + ": ")) << error;
    ASSERT_LE(memory_stats().peak - live, 16 * file.size() + (1 << 20)) << error;
  }
  ::munmap(mapped, kMost);
  ::close(memory);
  std::printf("[ fuzz     ] npy: %d broken files, %d of them read\n", rounds, read_well);
  EXPECT_GT(read_well, rounds / 400);  // some damage is harmless; most is not
  EXPECT_LT(read_well, rounds / 2);
}

// ---- writing ------------------------------------------------------------------------------------

TEST(NpyWrite, RefusesWhatTheFormatLacks) {
  const Temporary t;
  EXPECT_EQ(error_of([&] { write_npy(t.path("x.npy"), zeros({1}, DType::bf16)); }),
            "usage: write_npy: .npy has no bf16; convert with to(x, DType::f32)");
  EXPECT_EQ(error_of([&] { write_npy(t.path("x.npy"), {}); }), "usage: write_npy: undefined tensor");
  EXPECT_TRUE(t.names().empty());
}

TEST(NpyWrite, WhereItCannotLeavesNothing) {
  const Temporary t;
  const std::string here = t.path("no/such/x.npy"), file = t.file("file", "");
  EXPECT_TRUE(error_of([&] { write_npy(here, zeros({1})); }).starts_with("data: " + here + ": cannot write: making /"));
  EXPECT_NE(error_of([&] { write_npy(file + "/x.npy", zeros({1})); }).find(": Not a directory"), std::string::npos);
  EXPECT_NE(error_of([&] {
              write_npy("/proc/x.npy", zeros({1}));
            }).find("data: /proc/x.npy: cannot write: making /proc/x.npy.tmp."),
            std::string::npos);
  EXPECT_EQ(error_of([&] { write_npy(t.directory(), zeros({1})); }),
            "data: " + t.directory() + ": is a directory; refused to write a file in its place");
  EXPECT_EQ(error_of([&] { write_npy("/dev/null", zeros({1})); }),
            "data: /dev/null: is not a regular file; refused to write a file in its place");
  EXPECT_TRUE(std::filesystem::is_character_file("/dev/null"));
  EXPECT_EQ(t.names(), Names{"file"});
}

/// Files of this process may grow to `bytes` while it lives: beyond, writing fails as on a full
/// disk.
class FullDisk {
 public:
  explicit FullDisk(std::size_t bytes) {
    ::getrlimit(RLIMIT_FSIZE, &before_);
    rlimit small = before_;
    small.rlim_cur = bytes;
    ::setrlimit(RLIMIT_FSIZE, &small);
    handler_ = std::signal(SIGXFSZ, SIG_IGN);
  }
  FullDisk(const FullDisk&) = delete;
  FullDisk& operator=(const FullDisk&) = delete;
  ~FullDisk() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, handler_);
  }

 private:
  rlimit before_{};
  void (*handler_)(int);
};

TEST(NpyWrite, OnAFullDiskLeavesWhatWasThere) {
  const Temporary t;
  const std::string path = t.path("x.npy");
  write_npy(path, arange(3));
  for (std::size_t room : {0u, 100u, 128u, 5000u}) {
    std::string error;
    {
      const FullDisk full(room);
      error = error_of([&] { write_npy(path, zeros({2000})); });
    }
    EXPECT_EQ(error, "data: " + path + ": cannot write 8128 bytes: File too large; nothing was left behind");
    EXPECT_EQ(t.names(), Names{"x.npy"});
    EXPECT_EQ(read_npy(path).to_vector(), Numbers({0, 1, 2}));
  }
  const FullDisk enough(8128);
  write_npy(path, zeros({2000}));
}

TEST(NpyWrite, ReadersSeeOneWholeFileOrAnother) {
  const Temporary t;
  const std::string path = t.path("x.npy");
  write_npy(path, full({5000}, 0, DType::i32));
  std::atomic<bool> stop{false};
  std::atomic<int> wrong{0}, reads{0};
  {
    std::vector<std::jthread> writers, readers;
    for (int n = 0; n < 3; ++n)
      readers.emplace_back([&] {
        while (!stop || reads < 10) {
          const std::vector<std::int32_t> v = read_npy(path).to_vector<std::int32_t>();
          wrong += v.size() != 5000 || std::count(v.begin(), v.end(), v[0]) != 5000;
          ++reads;
        }
      });
    for (int n = 1; n <= 3; ++n)
      writers.emplace_back([&, n] {
        for (int i = 0; i < scaled(50, 10); ++i) write_npy(path, full({5000}, n, DType::i32));
      });
    writers.clear();
    stop = true;
  }
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(t.names(), Names{"x.npy"});
}

TEST(NpyWrite, FilesHaveOrdinaryPermissions) {
  const Temporary t;
  const mode_t before = ::umask(027);
  write_npy(t.path("x.npy"), arange(3));
  ::umask(before);
  struct stat status {};
  ASSERT_EQ(::stat(t.path("x.npy").c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0640u);
}

}  // namespace
}  // namespace hilt
