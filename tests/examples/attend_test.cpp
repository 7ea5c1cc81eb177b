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
#include <tuple>

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
    {"--order hilbert --pattern slide2d:1x0 --documents 2x2,3x4",
     [](Index t, Index u) {
       const Index width = t < 4 ? 2 : 4, first = t < 4 ? 0 : 4;
       return (t < 4) == (u < 4) && (t - first) % width == (u - first) % width &&
              std::abs((t - first) / width - (u - first) / width) <= 1;
     }},
    {"--order row --pattern segment:3 --causal token --documents 5,2,9",
     [](Index t, Index u) {
       const auto segment = [](Index i) { return i < 5 ? i / 3 : i < 7 ? 10 : 20 + (i - 7) / 3; };
       return u <= t && segment(t) == segment(u);
     }},
};

TEST_F(Attend, TakesAPartOfTheQueriesAndWritesWeights) {
  const auto drawn = [](hilt::Index rows, hilt::Index heads, std::uint64_t stream) {
    return hilt::randn({2, rows, heads, 3}, {1, stream}, hilt::DType::f64);
  };
  const Tensor q = drawn(12, 2, 1), k = drawn(12, 1, 2), v = drawn(12, 1, 3), d_o = drawn(12, 2, 4);
  const auto rows = [](const Tensor& x, hilt::Index first, hilt::Index n, int axis = 1) {
    return hilt::contiguous(hilt::slice(x, axis, first, first + n));
  };
  for (const auto& [name, x] : {std::pair("q", q), {"k", k}, {"v", v}, {"d_o", d_o}})
    hilt::write_npy(files.path(std::string(name) + ".npy"), x);
  const std::string set = "--order hilbert --pattern segment:4+segment:12,dilation=3 --causal token ";
  ASSERT_EQ(run(set + "--weights 1,5:2").status, 0);
  const Tensor o = read("o"), lse = read("lse"), dq = read("dq"), weights = read("weights");
  ASSERT_EQ(weights.shape(), (hilt::Shape{2, 3, 2, 12}));
  for (hilt::Index i = 0; i < 3; ++i) {  // o = weights v
    const Tensor w = hilt::squeeze(rows(weights, i, 1), 1), values = hilt::squeeze(v, 2);
    const Values made = hilt::matmul(w, values).to_vector(), want = rows(o, i == 0 ? 1 : 4 + i, 1).to_vector();
    for (std::size_t j = 0; j < want.size(); ++j) EXPECT_NEAR(made[j], want[j], 1e-13);
  }
  for (const auto& [queries, first, n] : {std::tuple("--queries 3:4", 3, 4), {"", 10, 2}, {"--queries 0:1", 0, 1}}) {
    hilt::write_npy(files.path("q.npy"), rows(q, first, n)),
        hilt::write_npy(files.path("d_o.npy"), rows(d_o, first, n));
    const Ran ran = run(set + queries);
    ASSERT_EQ(ran.status, 0) << ran.err;
    for (const auto& [got, whole, axis] : {std::tuple("o", o, 1), {"lse", lse, 2}, {"dq", dq, 1}}) {
      const Tensor want = rows(whole, first, n, axis);
      expect(got, want.to_vector(), hilt::DType::f64, want.shape(), 1e-13);
    }
  }
  EXPECT_NE(run(set + "--queries 3:4").err.find("--queries (3:4): names 4 tokens, and --q has 1 rows"),
            std::string::npos);
}

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

TEST_F(Attend, TakesAnOrderFromAFileOrFromPoints) {
  const Sizes n;
  const Inputs in = random_inputs(n);
  write(n, in, hilt::DType::f64);
  std::vector<std::int64_t> reversed, corners;
  for (Index t = 0; t < 16; ++t) reversed.push_back(15 - t), corners.push_back(t % 4), corners.push_back(t / 4);
  std::vector<std::int64_t> both = reversed;
  for (Index i = 0; i < 16; ++i) both.push_back(i * 5 % 16);
  hilt::write_npy(files.path("pi.npy"), hilt::from_values(reversed, {16}, hilt::DType::i32));
  hilt::write_npy(files.path("both.npy"), hilt::from_values(both, {2, 16}));
  hilt::write_npy(files.path("points.npy"), hilt::from_values(corners, {16, 2}));
  const std::string points = "--order points:" + files.path("points.npy"), pi = files.path("pi.npy");
  const auto quadrants = [](Index t, Index u) { return t / 8 == u / 8 && t % 4 / 2 == u % 4 / 2; };
  const Case cases[] = {{"/hilbert/bits=2 --pattern segment:4", quadrants},
                        {"/morton-trans/bits=2 --pattern segment:4 --causal token --ranks 2",
                         [&](Index t, Index u) { return u <= t && quadrants(t, u); }}};
  for (const Case& c : cases) {
    SCOPED_TRACE(c.flags);
    const Ran ran = run(points + c.flags);
    ASSERT_EQ(ran.status, 0) << ran.err;
    expect_all(n, brute_force(n, in, c.allowed), hilt::DType::f64, 1e-12);
  }
  const auto given = [&](const std::string& file, const std::string& more) {
    return run("--order given --permutation " + files.path(file) + " --pattern segment:5,shift=2 " + more);
  };
  for (const char* mode : {"taped", "hybrid", "fused"}) {
    ASSERT_EQ(given("pi.npy", std::string("--mode ") + mode).status, 0);
    expect_all(n, brute_force(n, in, [](Index t, Index u) { return (17 - t) / 5 == (17 - u) / 5; }), hilt::DType::f64,
               1e-12);
  }
  ASSERT_EQ(given("pi.npy", "").status, 0);
  const Values of_one = read("dk").to_vector();
  ASSERT_EQ(given("both.npy", "").status, 0);
  const Values of_both = read("dk").to_vector();
  for (std::size_t i = 0; i < of_one.size() / 2; ++i) EXPECT_EQ(of_one[i], of_both[i]);
  EXPECT_NE(of_one, of_both);

  const auto says = [](const Ran& ran, int status, const char* text) {
    EXPECT_EQ(ran.status, status) << ran.err;
    EXPECT_NE(ran.err.find(text), std::string::npos) << ran.err;
  };
  says(given("both.npy", "--ranks 2"), 2, "--ranks (2): rows have orders of their own; give one of all");
  says(given("pi.npy", "--documents 4,12"), 3,
       "permutation: row 0: position 0 names token 15, which is not among 0..3");
  says(given("points.npy", ""), 3, "--permutation: is i64[16, 2]; expected i32 or i64 [16] or [2, 16]");
  says(given("q.npy", ""), 3, "--permutation: is f64");
  reversed[3] = std::int64_t{1} << 33;
  hilt::write_npy(files.path("o.npy"), hilt::from_values(reversed, {16}));
  says(given("o.npy", ""), 3, "row 0: position 3 names token 8589934592, which is not among 0..15");
  reversed[3] = 12;
  hilt::write_npy(files.path("o.npy"), hilt::from_values(reversed, {16}));
  says(given("o.npy", "--out " + files.path("")), 2, "o.npy is an input; name another directory");
  says(run("--order given"), 2, "--order (given): needs --permutation FILE");
  says(run("--order row --permutation " + pi), 2, "goes with --order given, not row");
  says(run(points + "/peano"), 2, "/peano): kind: 'peano' is not one of");
  says(run(points + "/hilbert/morton"), 2, "/hilbert/morton): kind: 'hilbert/morton' is not one of");
  says(run(points + "/bits=3/bits=4"), 2, "--order: bits: '3/bits=4' is not a whole number");
  says(run(points + "/bits=4294967297"), 2, "): 4294967297 bits; expected 1..31 on 2 axes, 1..20 on 3");
  for (const char* odd : {"?", "/", "//bits=3"}) says(run(points + odd), 2, "expected points:FILE.npy[/KIND][/bits=B]");
  says(run("--order points:none.npy"), 3, "--order (points:none.npy): cannot open");
  says(run(points + " --documents 9,8"), 2, "--documents (9,8): those of row 0 hold more tokens than a row has, 16");
  Values spoiled(corners.begin(), corners.end());
  spoiled[3] = std::nan("");
  hilt::write_npy(files.path("o.npy"), hilt::from_values(spoiled, {16, 2}));
  says(run("--order points:" + files.path("o.npy")), 3, "o.npy): row 1 has nan on axis 1");
  // A point that lies in no document may be anything.
  spoiled[3] = static_cast<double>(corners[3]);
  std::vector<Values> with_and_without;
  for (const double last : {spoiled[31], std::nan("")}) {
    spoiled[31] = last;
    hilt::write_npy(files.path("o.npy"), hilt::from_values(spoiled, {16, 2}));
    ASSERT_EQ(run("--order points:" + files.path("o.npy") + " --documents 8,7 --pattern segment:4").status, 0);
    with_and_without.push_back(read("dk").to_vector());
  }
  EXPECT_EQ(with_and_without[0], with_and_without[1]);
  says(run("--order points:" + files.path("o.npy") + " --documents 8,8"), 3, "o.npy): row 15 has nan on axis 1");
  says(run("--order points:"), 2, "expected points:FILE.npy[/KIND][/bits=B]");
  says(run("--order points:" + pi), 3, "points [16]; expected [16, 2 or 3] or [2, 16, 2 or 3]");
}

// ---- score terms --------------------------------------------------------------------------------

/// Terms as their files hold them, on a 4 x 4 grid, and what attend computes with them: o and lse
/// by loops over the keys that `allowed` names.
struct TermFiles {
  double cap = 3;
  Values slopes, relative, bias, sink;  // [4], [4, 3, 5], [4, 1, 16], [4]
};
Outputs with_terms(const Sizes& n, const Inputs& in, const TermFiles& x, const Allowed& allowed) {
  Outputs out{Values(in.q.size()), Values(static_cast<std::size_t>(n.batch * n.heads * n.length)), {}, {}, {}};
  const auto at = [&](Index b, Index t, Index heads, Index h) {
    return static_cast<std::size_t>(((b * n.length + t) * heads + h) * n.dim);
  };
  const auto element = [](const Values& v, Index i) { return v[static_cast<std::size_t>(i)]; };
  for (Index b = 0; b < n.batch; ++b)
    for (Index h = 0; h < n.heads; ++h)
      for (Index t = 0; t < n.length; ++t) {
        const std::size_t q = at(b, t, n.heads, h);
        Values e(16);
        double sum = std::exp(element(x.sink, h));
        for (Index u = 0; u < n.length; ++u) {
          if (!allowed(t, u)) continue;
          const std::size_t k = at(b, u, n.kv_heads, h / (n.heads / n.kv_heads));
          double z = 0;
          for (std::size_t d = 0; d < static_cast<std::size_t>(n.dim); ++d) z += n.scale * in.q[q + d] * in.k[k + d];
          const Index dy = t / 4 - u / 4, dx = t % 4 - u % 4;
          const double s =
              x.cap * std::tanh(z / x.cap) - element(x.slopes, h) * static_cast<double>(std::abs(t - u)) +
              element(x.relative, (h * 3 + std::clamp<Index>(dy, -1, 1) + 1) * 5 + std::clamp<Index>(dx, -2, 2) + 2) +
              element(x.bias, h * 16 + u);
          sum += e[static_cast<std::size_t>(u)] = std::exp(s);
        }
        out.lse[static_cast<std::size_t>((b * n.heads + h) * n.length + t)] = std::log(sum);
        for (Index u = 0; u < n.length; ++u)
          for (std::size_t d = 0; d < static_cast<std::size_t>(n.dim); ++d)
            out.o[q + d] += element(e, u) / sum * in.v[at(b, u, n.kv_heads, h / (n.heads / n.kv_heads)) + d];
      }
  return out;
}

TEST_F(Attend, ScoreTermsFromFiles) {
  const Sizes n;
  const Inputs in = random_inputs(n);
  write(n, in, hilt::DType::f64);
  TermFiles terms;
  const auto draw = [](hilt::Shape shape, std::uint64_t stream) {
    return hilt::randn(shape, {5, stream}, hilt::DType::f64);
  };
  const std::tuple<const char*, Values TermFiles::*, hilt::Shape> files_of[] = {
      {"slopes", &TermFiles::slopes, {4}},
      {"relative", &TermFiles::relative, {4, 3, 5}},
      {"bias", &TermFiles::bias, {4, 1, 16}},
      {"sink", &TermFiles::sink, {4}}};
  std::string flags = " --softcap 3";
  std::uint64_t stream = 0;
  for (const auto& [name, member, shape] : files_of) {
    const Tensor x = draw(shape, ++stream);
    hilt::write_npy(files.path(std::string(name) + ".npy"), x);
    terms.*member = x.to_vector();
    flags += std::string(" --") + (name == std::string("slopes") ? "alibi" : name) + " " +
             files.path(std::string(name) + ".npy");
  }
  const Allowed allowed = kCases[1].allowed;
  const auto loss = [&](const TermFiles& x) {
    const Values o = with_terms(n, in, x, allowed).o;
    double sum = 0;
    for (std::size_t i = 0; i < o.size(); ++i) sum += o[i] * in.d_o[i];
    return sum;
  };
  const Outputs wanted = with_terms(n, in, terms, allowed);
  for (const char* how : {"--mode taped", "--mode hybrid", "--mode fused", "--ranks 3"}) {
    SCOPED_TRACE(how);
    const Ran ran = run(std::string(kCases[1].flags) + flags + " " + how);
    ASSERT_EQ(ran.status, 0) << ran.err;
    EXPECT_EQ(ran.err, "");
    expect("o", wanted.o, hilt::DType::f64, {n.batch, n.length, n.heads, n.dim}, 1e-12);
    expect("lse", wanted.lse, hilt::DType::f64, {n.batch, n.heads, n.length}, 1e-12);
    for (const auto& [name, member, shape] : files_of) {
      Values slope;
      for (std::size_t i = 0; i < (terms.*member).size(); ++i) {
        constexpr double kStep = 1e-5;
        TermFiles up = terms, down = terms;
        (up.*member)[i] += kStep, (down.*member)[i] -= kStep;
        slope.push_back((loss(up) - loss(down)) / (2 * kStep));
      }
      expect(std::string("d_") + name, slope, hilt::DType::f64, shape, 1e-8);
    }
  }
}

TEST_F(Attend, ATableLooksAtPoints) {
  const Sizes n;
  write(n, random_inputs(n), hilt::DType::f64);
  hilt::write_npy(files.path("table.npy"), hilt::randn({4, 3, 5}, {5, 1}, hilt::DType::f64));
  std::vector<std::int32_t> cells;
  for (std::int32_t t = 0; t < 16; ++t) cells.insert(cells.end(), {t / 4, t % 4});
  hilt::write_npy(files.path("points.npy"), hilt::from_values(cells, {16, 2}));
  hilt::write_npy(files.path("wide.npy"), hilt::from_values(cells, {16, 2}, hilt::DType::i64));
  const std::string table = " --relative " + files.path("table.npy");
  ASSERT_EQ(run("--order row:4x4" + table).status, 0);
  const std::vector<double> o = read("o").to_vector(), d = read("d_relative").to_vector();
  ASSERT_EQ(run("--order row --points " + files.path("points.npy") + table).status, 0);
  EXPECT_EQ(read("o").to_vector(), o);
  EXPECT_EQ(read("d_relative").to_vector(), d);
  const Ran alone = run("--order row --points " + files.path("points.npy")),
            wide = run("--order row --points " + files.path("wide.npy") + table);
  EXPECT_EQ(alone.status, 2);
  EXPECT_NE(alone.err.find("goes with --relative FILE"), std::string::npos) << alone.err;
  EXPECT_EQ(wide.status, 3);
  EXPECT_NE(wide.err.find("points are i64[16, 2]"), std::string::npos) << wide.err;
}

TEST_F(Attend, PublishedSlopesNeedNoFile) {
  const Sizes n;
  const Inputs in = random_inputs(n);
  write(n, in, hilt::DType::f64);
  hilt::write_npy(files.path("slopes.npy"), hilt::alibi_slopes(4, hilt::DType::f64));
  ASSERT_EQ(run("--order row --alibi " + files.path("slopes.npy")).status, 0);
  const Values wanted = read("o").to_vector();
  EXPECT_TRUE(std::filesystem::exists(files.path("out/d_slopes.npy")));
  std::filesystem::remove_all(files.path("out"));
  for (const char* flags : {"--order row --alibi", "--alibi --order row", "--order row --alibi published"}) {
    ASSERT_EQ(run(flags).status, 0) << flags;
    EXPECT_EQ(read("o").to_vector(), wanted) << flags;
    EXPECT_FALSE(std::filesystem::exists(files.path("out/d_slopes.npy"))) << flags;
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

TEST_F(Attend, ASeedDrawsTheSameWeightsOnAnyNumberOfRanks) {
  const Sizes n;
  write(n, random_inputs(n), hilt::DType::f64);
  const auto drawn = [&](const std::string& flags) {
    const Ran ran = run(std::string(kCases[0].flags) + flags);
    EXPECT_EQ(ran.status, 0) << flags;
    return std::pair(read("o").to_vector(), read("dv").to_vector());
  };
  const auto all = drawn(""), some = drawn(" --dropout 0.5 --seed 3");
  EXPECT_EQ(drawn(" --dropout 0.5 --seed 3"), some);
  EXPECT_NE(drawn(" --dropout 0.5 --seed 4"), some);
  EXPECT_NE(all, some);
  const auto apart = drawn(" --dropout 0.5 --seed 3 --ranks 2");
  for (std::size_t i = 0; i < some.first.size(); ++i) EXPECT_NEAR(apart.first[i], some.first[i], 1e-12);
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
    EXPECT_NE(ran.err.find("dilation 8 in segments of 4"), ran.err.npos) << ran.err;
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
