#pragma once
#include "task.h"

// Boards of height x width cells with a target a cell: inputs and targets are cells in rows.

namespace train {

extern const Profile kLife, kIsing;

/// Game of Life with nothing alive beyond the border (a dead border, not a torus): inputs are a
/// random board, targets the board one step later. Each board has its own density.
std::unique_ptr<Task> life_task(Index height, Index width, std::uint64_t seed);
/// The board after one step: a cell lives on with 2 or 3 neighbours, and comes alive with 3.
std::vector<std::int32_t> life_step(std::span<const std::int32_t> board, Index height, Index width);

/// Spins, 0 or 1, of a lattice with free borders: p ~ e^(coupling (alike neighbors - others)).
/// Everything is exact, by transfer matrices.
class Ising {
 public:
  static constexpr Index kMostSide = 12;
  static constexpr double kCritical = 0.44068679350977151;  // ln(1 + sqrt 2) / 2, of the infinite lattice
  static constexpr double kFlipped = 0.2;                   // share of spins that noise turns over
  Ising(Index height, Index width, double coupling = kCritical);
  std::vector<std::int32_t> sample(Draws& draws) const;
  /// For each spin, the probability that it was 1 before the noise.
  std::vector<double> posterior(std::span<const std::int32_t> noisy) const;

 private:
  double bonds(Index k, std::size_t state, bool up) const;
  std::size_t placed(Index k, std::size_t state, bool up) const;
  std::vector<std::vector<double>> messages(const std::vector<double>& lean) const;

  Index side_, cells_;
  std::vector<std::size_t> cell_;           // of the board, in the order of the walk
  std::vector<double> bond_;                // e^(coupling times -2 .. 2)
  std::vector<std::vector<double>> after_;  // without noise
};

/// Clean spins (targets) from noisy ones (inputs), at the critical coupling.
std::unique_ptr<Task> ising_task(Index height, Index width, std::uint64_t seed);

}  // namespace train
