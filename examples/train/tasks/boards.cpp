// Game of Life, and spins of the Ising model under noise, whose lattice is walked cell by cell, the
// shorter side inside, so that what is to come depends on the last `side_` spins alone:
//
//      after[k](state) = sum over spin k of e^(coupling spin (left + above)) lean^spin after[k + 1](state with spin k)
//
// Each is divided by its largest.
#include "boards.h"
#include <algorithm>
#include <cmath>

namespace train {

using namespace hilt;

const Profile kLife{.name = "life",
                    .help = "the next step of Game of Life, nothing living beyond the border",
                    .row = "board",
                    .target = "cell",
                    .on_grid = true,
                    .options = "grid",
                    .suited =
                        "--steps 500 --heads 4 --width 64 --lr 0.003 --weight-decay 0.1 --positions learned "
                        "--pattern slide2d:1x1",
                    .before = "whether the cell lives now",
                    .floor = "the rule",
                    .picture = "board, the model's next board (x: wrong)"};
const Profile kIsing{.name = "ising",
                     .help = "spins from noisy ones, whose best reader is known",
                     .row = "lattice",
                     .target = "spin",
                     .on_grid = true,
                     .options = "grid",
                     .suited =
                         "--steps 2000 --layers 4 --heads 4 --width 64 --lr 0.002 --weight-decay 0.1 "
                         "--positions learned --grid 12x12 --pattern segment:16 --pattern-odd segment:16,shift=8",
                     .before = "the spin itself, as noise left it",
                     .reader = "exact posterior",
                     .pays = "exact posterior's",
                     .knows = "every noisy spin, and how lattices come about",
                     .floor = "the same, on the rows of evaluations along the way",
                     .picture = "noisy spins, the model's guess (x: wrong), the spins"};

namespace {

class BoardTask : public Task {
 public:
  BoardTask(Index height, Index width, std::uint64_t seed)
      : Task(Vocabulary::characters({U'.', U'#'}), checked_mul(height, width, "board"), seed),
        height_(height),
        width_(width) {
    check(height >= 1 && width >= 1, "a board of ", height, "x", width);
  }
  void row(Split split, Index number, std::int32_t* inputs, std::int32_t* targets) const override {
    Draws draws = drawn(split, number);
    draw(draws, {inputs, at(length_)}, {targets, at(length_)});
  }

 protected:
  virtual void draw(Draws& draws, std::span<std::int32_t> inputs, std::span<std::int32_t> targets) const = 0;
  Index height_, width_;
};

class LifeTask : public BoardTask {
  using BoardTask::BoardTask;
  void draw(Draws& draws, std::span<std::int32_t> inputs, std::span<std::int32_t> targets) const override {
    constexpr double kThin = 0.15, kDense = 0.65;  // few boards outside live on, or differ from dead ones
    const double density = kThin + (kDense - kThin) * draws.uniform();
    for (std::int32_t& cell : inputs) cell = draws.uniform() < density;
    std::ranges::copy(life_step(inputs, height_, width_), targets.begin());
  }
  double floor() const override { return 0; }  // the next board follows from this one
};

class IsingTask : public BoardTask {
 public:
  IsingTask(Index height, Index width, std::uint64_t seed) : BoardTask(height, width, seed), lattice_(height, width) {}
  Exact exact(const std::int32_t* inputs, const std::int32_t* targets) const override {
    const std::vector<double> up = lattice_.posterior({inputs, at(length_)});
    Exact out{0, 0};
    for (std::size_t i = 0; i < up.size(); ++i) {
      out.cost -= std::log(targets[i] ? up[i] : 1 - up[i]);
      out.right += (up[i] > 0.5) == (targets[i] == 1);
    }
    return out;
  }

 private:
  void draw(Draws& draws, std::span<std::int32_t> inputs, std::span<std::int32_t> targets) const override {
    std::ranges::copy(lattice_.sample(draws), targets.begin());
    for (std::size_t i = 0; i < inputs.size(); ++i) inputs[i] = targets[i] ^ (draws.uniform() < Ising::kFlipped);
  }
  Ising lattice_;
};

}  // namespace

std::vector<std::int32_t> life_step(std::span<const std::int32_t> board, Index height, Index width) {
  check(static_cast<Index>(board.size()) == height * width, "life_step: ", board.size(), " cells for a board of ",
        height, "x", width);
  std::vector<std::int32_t> next(board.size());
  for (Index y = 0; y < height; ++y)
    for (Index x = 0; x < width; ++x) {
      std::int32_t alive = 0;  // in the 3x3 around, the cell included
      for (Index v = std::max<Index>(y - 1, 0); v < std::min(y + 2, height); ++v)
        for (Index u = std::max<Index>(x - 1, 0); u < std::min(x + 2, width); ++u) alive += board[at(v * width + u)];
      const auto cell = at(y * width + x);
      next[cell] = alive == 3 || (alive == 4 && board[cell] == 1);
    }
  return next;
}

// ---- the lattice --------------------------------------------------------------------------------
Ising::Ising(Index height, Index width, double coupling) : side_(std::min(height, width)), cells_(height * width) {
  check(side_ >= 1 && std::max(height, width) <= kMostSide, "Ising: a lattice of ", height, "x", width,
        "; its exact answer is known up to ", kMostSide, "x", kMostSide);
  for (Index k = 0; k < cells_; ++k) cell_.push_back(at(height >= width ? k : k % side_ * width + k / side_));
  for (int same = -2; same <= 2; ++same) bond_.push_back(std::exp(coupling * same));
  after_ = messages(std::vector<double>(at(cells_), 1.0));
}

// A state has a bit for each column: the last spin there, up or not.
std::size_t Ising::placed(Index k, std::size_t state, bool up) const {
  const std::size_t bit = std::size_t{1} << k % side_;
  return up ? state | bit : state & ~bit;
}

double Ising::bonds(Index k, std::size_t state, bool up) const {
  const Index column = k % side_;
  Index same = 2;  // neighbors before spin k that are as it is, less those that are not, plus 2
  if (k >= side_) same += (state >> column & 1) == up ? 1 : -1;
  if (column > 0) same += (state >> (column - 1) & 1) == up ? 1 : -1;
  return bond_[at(same)];
}

std::vector<std::vector<double>> Ising::messages(const std::vector<double>& lean) const {
  const std::size_t states = std::size_t{1} << side_;
  std::vector<std::vector<double>> after(at(cells_ + 1), std::vector<double>(states, 1.0));
  for (Index k = cells_ - 1; k >= 0; --k) {
    std::vector<double>& here = after[at(k)];
    const std::vector<double>& next = after[at(k + 1)];
    for (std::size_t s = 0; s < states; ++s)
      here[s] = bonds(k, s, true) * lean[at(k)] * next[placed(k, s, true)] +
                bonds(k, s, false) / lean[at(k)] * next[placed(k, s, false)];
    const double largest = *std::ranges::max_element(here);
    for (double& x : here) x /= largest;
  }
  return after;
}

std::vector<std::int32_t> Ising::sample(Draws& draws) const {
  std::vector<std::int32_t> spins(at(cells_));
  std::size_t state = 0;
  for (Index k = 0; k < cells_; ++k) {
    const auto share = [&](bool up) { return bonds(k, state, up) * after_[at(k + 1)][placed(k, state, up)]; };
    const bool up = draws.uniform() * (share(true) + share(false)) < share(true);
    spins[cell_[at(k)]] = up;
    state = placed(k, state, up);
  }
  return spins;
}

std::vector<double> Ising::posterior(std::span<const std::int32_t> noisy) const {
  check(std::ssize(noisy) == cells_, "Ising: ", noisy.size(), " spins for a lattice of ", cells_);
  static const double kLean = std::sqrt((1 - kFlipped) / kFlipped);  // of a spin that is seen up
  std::vector<double> lean, up(at(cells_));
  for (const std::size_t cell : cell_) lean.push_back(noisy[cell] ? kLean : 1 / kLean);
  const std::vector<std::vector<double>> after = messages(lean);
  std::vector<double> before(after[0].size()), next;  // the sum over what came, to a state
  before[0] = 1;
  for (Index k = 0; k < cells_; ++k) {
    double of[2] = {0, 0}, total = 0;
    next.assign(before.size(), 0);
    for (std::size_t s = 0; s < before.size(); ++s)
      for (const bool is_up : {false, true}) {
        const std::size_t then = placed(k, s, is_up);
        const double x = before[s] * bonds(k, s, is_up) * (is_up ? lean[at(k)] : 1 / lean[at(k)]);
        next[then] += x, total += x;
        of[is_up] += x * after[at(k + 1)][then];
      }
    up[cell_[at(k)]] = of[1] / (of[0] + of[1]);
    for (double& x : next) x /= total;
    before.swap(next);
  }
  return up;
}

std::unique_ptr<Task> life_task(Index height, Index width, std::uint64_t seed) {
  return std::make_unique<LifeTask>(height, width, seed);
}
std::unique_ptr<Task> ising_task(Index height, Index width, std::uint64_t seed) {
  return std::make_unique<IsingTask>(height, width, seed);
}

}  // namespace train
