// A library put in front of the C library of one process (LD_PRELOAD): in threads but the first,
// one allocation of HILT_NO_MEMORY_ONE_OF fails, drawn anew in each thread.
#include <dlfcn.h>
#include <unistd.h>
#include <cstdlib>
#include <random>

extern "C" void* malloc(std::size_t bytes) noexcept {
  static auto* const real = reinterpret_cast<void* (*)(std::size_t)>(::dlsym(RTLD_NEXT, "malloc"));
  static const char* const one_of = std::getenv("HILT_NO_MEMORY_ONE_OF");
  if (one_of && ::gettid() != ::getpid()) {
    thread_local std::minstd_rand draw(static_cast<unsigned>(::gettid()));
    if (draw() % static_cast<unsigned>(std::atoi(one_of)) == 0) return nullptr;
  }
  return real(bytes);
}
