#pragma once
#include "task.h"

// Images with a label: a token is a patch, and a row has one target.

namespace train {

/// Patches of a row, and their side in pixels.
struct Patches {
  Index height, width, side;
};

/// Drawn anew each: a disc, ring, square, frame, plus or cross anywhere, of any size, in noise.
std::unique_ptr<Task> shapes_task(const Patches& patches, std::uint64_t seed);

/// A task from .npy files: images [N, H, W] or [N, H, W, C] of any type, and labels [N], read once.
/// A tenth of the images is for validation; pixels count in deviations from the mean of all.
std::unique_ptr<Task> images_task(const std::string& images, const std::string& labels, const Patches& patches,
                                  std::uint64_t seed);
/// How an image of this file divides into patches of that side.
Patches patches_of(const std::string& images, Index side);

}  // namespace train
