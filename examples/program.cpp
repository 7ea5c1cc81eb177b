#include "program.h"
#include <hilt/hilt.h>
#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <iostream>
#include <new>

namespace program {
namespace {

int report(const std::string& program, hilt::Code code, std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  std::cout.flush();
  std::cerr << program + ": error: " + text + '\n';  // one write: ranks share the stream
  return static_cast<int>(code);
}

}  // namespace

int run(const std::string& program, const std::function<int()>& work) {
  std::signal(SIGPIPE, SIG_DFL);  // `program | head` ends quietly, whatever the parent process ignores
  try {
    hilt::check_version();
    const int status = work();
    if (!std::cout.flush()) hilt::fail_with(hilt::Code::data, "standard output: ", std::strerror(errno));
    return status;
  } catch (const hilt::Error& e) {
    return report(program, e.code(), e.what());
  } catch (const std::bad_alloc&) {
    return report(program, hilt::Code::memory, "out of memory");
  } catch (const std::exception& e) {
    return report(program, hilt::Code::internal, std::string("internal: ") + e.what());
  } catch (...) {
    return report(program, hilt::Code::internal, "internal: an exception of unknown type");
  }
}

hilt::Device device_of(const std::string& text) {
  hilt::check(text == "auto" || text == "cpu" || text == "cuda" || text.starts_with("cuda:"), "--device (", text, "): must be auto, cpu, cuda or cuda:N");
  return hilt::device_named(text);
}

hilt::Device device_of_rank(const std::string& text, int rank) {
  hilt::Device device = device_of(text);
  if (device.is_cuda() && !text.starts_with("cuda:")) device.index = rank % static_cast<int>(hilt::gpu_descriptions().size());
  return device;
}

}  // namespace program
