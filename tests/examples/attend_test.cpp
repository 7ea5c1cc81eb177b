// The program attend against a brute force that knows nothing of the library: sets from pictures of
// the grid, loops for the rest.
#include <gtest/gtest.h>
#include <hilt/hilt.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <limits>

#include "../support/temporary.h"

namespace {

using hilt::Index;
using hilt::Tensor;
using Values = std::vector<double>;

/// Whether token t may attend to token u.
using Allowed = std::function<bool(Index t, Index u)>;

struct Sizes {
  Index batch = 2, length = 16, heads = 4, kv_heads = 2, dim = 5;
  double scale = 1 / std::sqrt(5.0);
};
struct Inputs {
  Values q, k, v, d_o;
};
struct Outputs {
  Values o, lse, dq, dk, dv;
};

Inputs random_inputs(const Sizes& n) {
  std::uint64_t state = 88172645463325252u;  // xorshift
  const auto values = [&](Index heads) {
    Values x(static_cast<std::size_t>(n.batch * n.length * heads * n.dim));
    for (double& value : x) {
      state ^= state << 13, state ^= state >> 7, state ^= state << 17;
      value = static_cast<double>(state >> 11) * 0x1p-52 * 2 - 2;
    }
    return x;
  };
  return {values(n.heads), values(n.kv_heads), values(n.kv_heads), values(n.heads)};
}

Outputs brute_force(const Sizes& n, const Inputs& in, const Allowed& allowed) {
  Outputs out{Values(in.q.size()), Values(static_cast<std::size_t>(n.batch * n.heads * n.length)), Values(in.q.size()),
              Values(in.k.size()), Values(in.k.size())};
  const auto at = [&](Index b, Index t, Index heads, Index h) {
    return static_cast<std::size_t>(((b * n.length + t) * heads + h) * n.dim);
  };
  const auto dim = static_cast<std::size_t>(n.dim);
  const auto dot = [&](const Values& a, std::size_t i, const Values& b, std::size_t j) {
    double sum = 0;
    for (std::size_t d = 0; d < dim; ++d) sum += a[i + d] * b[j + d];
    return sum;
  };
  for (Index b = 0; b < n.batch; ++b)
    for (Index h = 0; h < n.heads; ++h)
      for (Index t = 0; t < n.length; ++t) {
        const Index kh = h / (n.heads / n.kv_heads);
        const std::size_t q = at(b, t, n.heads, h);
        double sum = 0;
        for (Index u = 0; u < n.length; ++u)
          if (allowed(t, u)) sum += std::exp(n.scale * dot(in.q, q, in.k, at(b, u, n.kv_heads, kh)));
        const double lse = std::log(sum);
        out.lse[static_cast<std::size_t>((b * n.heads + h) * n.length + t)] = lse;
        const auto weight = [&](Index u) {
          return std::exp(n.scale * dot(in.q, q, in.k, at(b, u, n.kv_heads, kh)) - lse);
        };
        for (Index u = 0; u < n.length; ++u)
          for (std::size_t d = 0; d < dim && allowed(t, u); ++d)
            out.o[q + d] += weight(u) * in.v[at(b, u, n.kv_heads, kh) + d];
        for (Index u = 0; u < n.length; ++u) {
          if (!allowed(t, u)) continue;
          const std::size_t k = at(b, u, n.kv_heads, kh);
          const double p = weight(u), ds = n.scale * p * (dot(in.d_o, q, in.v, k) - dot(in.d_o, q, out.o, q));
          for (std::size_t d = 0; d < dim; ++d) {
            out.dq[q + d] += ds * in.k[k + d];
            out.dk[k + d] += ds * in.q[q + d];
            out.dv[k + d] += p * in.d_o[q + d];
          }
        }
      }
  return out;
}

struct Ran {
  int status;
  std::string out, err;
};

class Attend : public testing::Test {
 protected:
  void write(const Sizes& n, const Inputs& in, hilt::DType dtype) {
    const auto file = [&](const char* name, const Values& x, Index heads) {
      hilt::write_npy(files.path(name), hilt::from_values(x, {n.batch, n.length, heads, n.dim}, dtype));
    };
    file("q.npy", in.q, n.heads), file("k.npy", in.k, n.kv_heads), file("v.npy", in.v, n.kv_heads),
        file("d_o.npy", in.d_o, n.heads);
  }
  Ran run(const std::string& flags) {
    const std::string here = files.directory() + "/";
    const int status = std::system((std::string(std::getenv("ATTEND")) + " --q " + here + "q.npy --k " + here +
                                    "k.npy --v " + here + "v.npy --d-o " + here + "d_o.npy --out " + here + "out " +
                                    flags + " >" + here + "stdout 2>" + here + "stderr")
                                       .c_str());
    return {WEXITSTATUS(status), files.content("stdout"), files.content("stderr")};
  }
  Tensor read(const std::string& name) { return hilt::read_npy(files.path("out/" + name + ".npy")); }

  void expect(const std::string& name, const Values& wanted, hilt::DType dtype, const hilt::Shape& shape,
              double tolerance) {
    const Tensor x = read(name);
    EXPECT_EQ(x.dtype(), dtype) << name;
    ASSERT_EQ(x.shape(), shape) << name;
    const Values got = x.to_vector();
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      if (wanted[i] == got[i]) continue;  // infinities
      ASSERT_NEAR(got[i], wanted[i], tolerance) << name << "[" << i << "]";
    }
  }
  void expect_all(const Sizes& n, const Outputs& wanted, hilt::DType dtype, double tolerance) {
    const hilt::Shape q{n.batch, n.length, n.heads, n.dim}, k{n.batch, n.length, n.kv_heads, n.dim};
    expect("o", wanted.o, dtype, q, tolerance);
    expect("lse", wanted.lse, dtype, {n.batch, n.heads, n.length}, tolerance);
    expect("dq", wanted.dq, dtype, q, tolerance);
    expect("dk", wanted.dk, dtype, k, tolerance);
    expect("dv", wanted.dv, dtype, k, tolerance);
  }

  hilt::Temporary files;
};

struct Case {
  const char* flags;
  Allowed allowed;
};

// On a 4x4 grid four positions of the Hilbert curve are a quadrant; a snake's position is its
// row's, read back and forth.
const Case kCases[] = {
    {"--order hilbert:4x4 --pattern segment:4",
     [](Index t, Index u) { return t / 8 == u / 8 && t % 4 / 2 == u % 4 / 2; }},
    {"--order hilbert:4x4 --pattern segment:4 --causal token",
     [](Index t, Index u) { return u <= t && t / 8 == u / 8 && t % 4 / 2 == u % 4 / 2; }},
    {"--order snake:4x4 --pattern slide:2",
     [](Index t, Index u) {
       const auto position = [](Index i) { return i / 4 * 4 + (i / 4 % 2 ? 3 - i % 4 : i % 4); };
       return std::abs(position(t) - position(u)) <= 2;
     }},
    {"--order tiles:4x4/2x2 --pattern slide2d:1x0",
     [](Index t, Index u) { return std::abs(t / 4 - u / 4) <= 1 && t % 4 == u % 4; }},
    {"--order morton:4x4 --pattern dense --causal token", [](Index t, Index u) { return u <= t; }},
};

TEST_F(Attend, AgreesWithBruteForceInEveryMode) {
  const Sizes n;
  const Inputs in = random_inputs(n);
  write(n, in, hilt::DType::f64);
  for (const Case& c : kCases)
    for (const char* mode : {"taped", "hybrid", "fused"}) {
      SCOPED_TRACE(std::string(c.flags) + " " + mode);
      const Ran ran = run(std::string(c.flags) + " --mode " + mode);
      ASSERT_EQ(ran.status, 0) << ran.err;
      EXPECT_EQ(ran.err, "");
      expect_all(n, brute_force(n, in, c.allowed), hilt::DType::f64, 1e-12);
    }
}

TEST_F(Attend, ScaleAndTypes) {
  Sizes n;
  n.scale = 0.25;
  Inputs in = random_inputs(n);
  for (Values* x : {&in.q, &in.k, &in.v, &in.d_o})
    for (double& value : *x) value = static_cast<float>(value);
  const Outputs wanted = brute_force(n, in, kCases[0].allowed);
  write(n, in, hilt::DType::f32);
  ASSERT_EQ(run(std::string(kCases[0].flags) + " --scale 0.25").status, 0);
  expect_all(n, wanted, hilt::DType::f32, 1e-5);
  // Computing in another type changes the precision, not the type of the files.
  ASSERT_EQ(run(std::string(kCases[0].flags) + " --scale 0.25 --dtype bf16").status, 0);
  expect_all(n, wanted, hilt::DType::f32, 0.1);
  write(n, in, hilt::DType::f64);
  ASSERT_EQ(run(std::string(kCases[0].flags) + " --scale 0.25 --dtype f32").status, 0);
  expect_all(n, wanted, hilt::DType::f64, 1e-5);
}

TEST_F(Attend, RowsWithoutKeysAreZeroAndCounted) {
  const Sizes n;
  const Inputs in = random_inputs(n);
  write(n, in, hilt::DType::f64);
  // Segments of 4, keys at 5, 13 ..: beyond every segment. Nobody attends to anything.
  for (const char* mode : {"taped", "hybrid", "fused"}) {
    SCOPED_TRACE(mode);
    const Ran ran = run(std::string("--order row --pattern segment:4,dilation=8,offset=5 --mode ") + mode);
    ASSERT_EQ(ran.status, 0) << ran.err;
    EXPECT_NE(ran.err.find("attend: warning: 16 of 16 rows attend to nothing"), ran.err.npos) << ran.err;
    EXPECT_NE(ran.err.find("dilation 8 exceeds the segment, 4"), ran.err.npos) << ran.err;
    Outputs wanted = brute_force(n, in, [](Index, Index) { return false; });
    expect_all(n, wanted, hilt::DType::f64, 0);
    EXPECT_EQ(read("lse").to_vector()[0], -std::numeric_limits<double>::infinity());
  }
}

TEST_F(Attend, WithoutACotangentThereAreNoGradients) {
  const Sizes n;
  write(n, random_inputs(n), hilt::DType::f32);
  const std::string here = files.directory() + "/";
  ASSERT_EQ(std::system((std::string(std::getenv("ATTEND")) + " --q " + here + "q.npy --k " + here + "k.npy --v " +
                         here + "v.npy --out " + here + "out >" + here + "stdout")
                            .c_str()),
            0);
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(here + "out")) names.push_back(entry.path().filename());
  std::ranges::sort(names);
  EXPECT_EQ(names, (std::vector<std::string>{"lse.npy", "o.npy"}));
}

}  // namespace
