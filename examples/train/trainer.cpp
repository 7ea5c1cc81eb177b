// An update and an evaluation: micro-batches forward and back, sums over ranks, one AdamW step.
#include "run.h"
#include <exception>

namespace train {

constexpr double kFirstScale = 1 << 16;             // of a loss in f16
constexpr Index kGrows = 1000;                      // good updates after which it doubles
constexpr std::uint64_t kNoiseSeed = 0x6e6f697365;  // keeps dropout's numbers apart from those of weights and rows

Trainer::Trainer(hilt::Transformer model, std::shared_ptr<const Task> task, std::uint64_t seed,
                 const hilt::AdamW& adamw, hilt::Device device, const hilt::RankGrid& grid)
    : device_(device),
      grid_(grid),
      task_(std::move(task)),
      model_(std::move(model)),
      optimizer_(adamw),
      decay_(adamw.weight_decay),
      parameters_(hilt::parameters_of(model_)),
      noise_(seed ^ kNoiseSeed),
      replay_(device_) {
  for (const hilt::NamedParameter& p : parameters_) *p.tensor = hilt::moved(*p.tensor, device_);
  optimizer_.prepare(parameters_);
  if (is_scaled()) scale_ = kFirstScale;
}

// While a GPU computes a step, a thread makes the next one's rows; a CPU makes them when asked.
std::future<std::vector<hilt::Batch>> Trainer::fetch(const Asked& asked) const {
  return std::async(device_.is_cuda() ? std::launch::async : std::launch::deferred, [task = task_, asked] {
    std::vector<hilt::Batch> batches;
    for (Index i = 0; i < asked.accumulate; ++i)
      batches.push_back(task->batch(Split::train, asked.first + i * asked.batch, asked.batch));
    return batches;
  });
}

// Each rank's loss counts by its share of the targets, so that gradients add up over ranks.
void Trainer::load(Index batch, Index accumulate) {
  if (micro_batches_.size() != static_cast<std::size_t>(accumulate)) replay_ = hilt::Replay(device_);
  micro_batches_.resize(static_cast<std::size_t>(accumulate));
  const Asked now{rows_, batch, accumulate};
  if (ahead_ != now) next_ = fetch(now);
  const std::vector<hilt::Batch> batches = next_.get();
  rows_ += batch * accumulate;
  ahead_ = {rows_, batch, accumulate};
  next_ = fetch(ahead_);
  for (std::size_t i = 0; i < batches.size(); ++i) {
    const hilt::Batch& whole = batches[i];
    MicroBatch& mine = micro_batches_[i];
    hilt::RankGrid::Part part = grid_.part_of(whole, model_.blocks.front().attention);
    mine.share = grid_.world().size() == 1 ? 1
                                           : static_cast<double>(hilt::count_targets(part.batch.targets)) /
                                                 static_cast<double>(hilt::count_targets(whole.targets));
    const auto put = [&](Tensor& to, const Tensor& from) {
      if (device_.is_cuda() && to && to.shape() == from.shape()) return hilt::copy(to, hilt::moved(from, device_));
      to = hilt::moved(from, device_);
      if (replay_.is_recorded()) replay_ = hilt::Replay(device_);  // it reads where the old ones are
    };
    put(mine.part.batch.inputs, part.batch.inputs);
    put(mine.part.batch.targets, part.batch.targets);
    mine.part.place = part.place;
  }
}

// Loss, gradients and their norm. `checked`: under a tape that looks at every result.
void Trainer::pass(bool checked) {
  loss_ = {}, gradients_ = {};
  for (const MicroBatch& rows : micro_batches_) {
    hilt::Tape tape({.check_finite = checked});
    hilt::watch_parameters(tape, model_);
    Tensor loss =
        model_.loss(rows.part.batch.inputs, rows.part.batch.targets, {.noise = &noise_, .place = &rows.part.place});
    if (rows.share != 1) loss = hilt::mul(loss, rows.share);
    hilt::Gradients gradients = tape.backward(scale_ == 1 ? loss : hilt::mul(loss, scale_));
    if (loss_) gradients_ += gradients;
    else gradients_ = std::move(gradients);
    const hilt::Tape::Pause pause;
    loss_ = loss_ ? hilt::add(loss_, loss) : loss;
  }
  const auto count = static_cast<Index>(micro_batches_.size());
  if (count > 1) loss_ = hilt::mul(loss_, 1 / static_cast<double>(count));
  gradients_ = grid_.sum(hilt::mean_of(std::move(gradients_), parameters_, count), parameters_);
  norm_ = hilt::norm_of(gradients_, parameters_, loss_);
}

std::pair<double, bool> Trainer::attempt(Index batch, Index accumulate, double lr, double clip, bool stop) {
  load(batch, accumulate);
  const auto update = [&] {
    whole_ = false;
    optimizer_.step(parameters_, gradients_, lr, {norm_, clip, scale_});
  };
  if (grid_.world().size() > 1) {
    pass(false);
    const std::vector<double> total = grid_.sum({loss_.item(), stop ? 1.0 : 0.0});
    if (!std::isfinite(total[0])) norm_ = hilt::full({}, total[0], hilt::DType::f64, device_);  // on every rank
    update();
    return {total[0], total[1] > 0};
  }
  // The tape and the hybrid look at values as they go, and make their masks on the host.
  if (model_.config.backward == hilt::Backward::fused) replay_([&] { pass(false); });
  else pass(false);
  update();
  return {loss_.item(), stop};  // a GPU is waited for here, and not before
}

Update Trainer::step(Index batch, Index accumulate, double lr, double clip, bool stop) {
  const Index updates = steps();
  struct Undo {
    Trainer& of;
    Index rows;
    hilt::RandomKey noise;
    int before = std::uncaught_exceptions();
    ~Undo() {
      if (std::uncaught_exceptions() != before && of.whole_) of.rows_ = rows, of.noise_.set_state(noise);
    }
  };
  const Undo undo{*this, rows_, noise_.state()};
  for (Index skipped = 0;; ++skipped) {
    const hilt::RandomKey here = noise_.state();
    const auto [loss, stops] = attempt(batch, accumulate, lr, clip, stop);
    const double norm = norm_.item() / scale_, scale = scale_;
    if (std::isfinite(norm)) {
      if (is_scaled() && ++good_ == kGrows) rescale(2);
      whole_ = true;
      if (!replay_.is_recorded()) gradients_ = {};
      return {loss, norm, lr, stops, skipped, scale};
    }
    optimizer_.set_steps(updates);  // nothing was updated
    if (!is_scaled() || !std::isfinite(loss) || scale_ <= 1) {
      rows_ = undo.rows;
      explain(loss, here, lr * decay_ > 2 ? "--weight-decay" : clip > 0 ? "--lr" : "--lr, or set --clip 1");
    }
    whole_ = true;
    rescale(0.5);
  }
}

void Trainer::rescale(double by) {
  scale_ *= by, good_ = 0;
  loss_ = {}, norm_ = {}, gradients_ = {};
  replay_ = hilt::Replay(device_);  // it has the old one
}

// Once more, looking where it begins.
void Trainer::explain(double loss, const hilt::RandomKey& noise, const char* what_to_lower) {
  loss_ = {}, norm_ = {}, gradients_ = {};
  replay_ = hilt::Replay(device_);  // its memory serves what follows
  std::string why;
  for (const hilt::NamedParameter& parameter : parameters_)
    if (why.empty() && !std::isfinite(hilt::global_norm(std::span(parameter.tensor, 1))))
      why = "parameter " + parameter.name + " is not finite after update " + std::to_string(steps());
  noise_.set_state(noise);
  try {
    if (why.empty()) pass(true), hilt::clip_grad_norm(gradients_, parameters_, 0);
  } catch (const hilt::Error& e) { why = e.what(); }
  noise_.set_state(noise);
  hilt::fail_with(hilt::Code::not_a_number, "loss (", loss, "): not finite at step ", steps() + 1, ": ", why,
                  "; lower ", what_to_lower);
}

Evaluation Trainer::evaluate(Index rows, Index batch) {
  const hilt::Tape::Pause pause;
  std::vector<double> sums(3);  // of losses, of targets that were hit, of targets
  for (Index first = 0; first < rows; first += batch) {
    const Index count = std::min(batch, rows - first);
    const hilt::RankGrid::Part part =
        grid_.part_of(task_->batch(Split::validation, first, count), model_.blocks.front().attention);
    const Tensor logits = model_.logits(part.batch.inputs, {.place = &part.place});
    const double targets = static_cast<double>(hilt::count_targets(part.batch.targets));
    sums[0] += hilt::cross_entropy(logits, hilt::moved(part.batch.targets, device_)).item() * targets;
    const auto guess = hilt::argmax(logits).to_vector<Index>(), target = part.batch.targets.to_vector<Index>();
    for (std::size_t i = 0; i < guess.size(); ++i) sums[1] += guess[i] == target[i];
    sums[2] += targets;
  }
  sums = grid_.sum(sums);
  return {sums[0] / sums[2], sums[1] / sums[2]};
}

std::vector<hilt::SafetensorsItem> Trainer::items() {
  std::vector<hilt::SafetensorsItem> out;
  for (const hilt::NamedParameter& p : parameters_) out.push_back({"model." + p.name, *p.tensor});
  optimizer_.visit_state([&](const std::string& name, Tensor& t) { out.push_back({"optimizer." + name, t}); });
  return out;
}

hilt::SafetensorsMetadata Trainer::counters() const {
  const hilt::RandomKey noise = noise_.state();
  hilt::SafetensorsMetadata out{{"updates", std::to_string(steps())},
                                {"rows", std::to_string(rows_)},
                                {"noise.seed", std::to_string(noise.seed)},
                                {"noise.stream", std::to_string(noise.stream)},
                                {"vocabulary", task_->vocabulary().text()}};
  if (!is_scaled()) return out;
  out["scale.power"] = std::to_string(std::ilogb(scale_));
  out["scale.good"] = std::to_string(good_);
  return out;
}

void Trainer::restore(const hilt::Checkpoint& checkpoint) {
  std::vector<hilt::SafetensorsItem> all = items();  // copies share the tensors
  for (hilt::SafetensorsItem& item : all) item.tensor = hilt::moved(item.tensor, {});
  // The optimizer's own count came later than the first checkpoints, which have "updates".
  if (!checkpoint.file().find("optimizer.steps"))
    std::erase_if(all, [](const auto& item) { return item.name == "optimizer.steps"; });
  checkpoint.read(all);
  if (device_.is_cuda()) {
    std::vector<hilt::SafetensorsItem> there = items();
    for (std::size_t i = 0; i < all.size(); ++i) hilt::copy(there[i].tensor, hilt::moved(all[i].tensor, device_));
  }
  optimizer_.set_steps(checkpoint.get_index("updates"));
  rows_ = checkpoint.get_index("rows");
  if (is_scaled()) {
    scale_ = std::ldexp(1.0, static_cast<int>(std::min<Index>(checkpoint.get_index("scale.power"), 100)));
    good_ = checkpoint.get_index("scale.good");
  }
  noise_.set_state({checkpoint.get_number("noise.seed"), checkpoint.get_number("noise.stream")});
}

}  // namespace train
