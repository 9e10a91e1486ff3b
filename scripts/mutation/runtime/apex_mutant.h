// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdlib>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/// Included by mutated sources. APEX_MUTANT is the number of the mutant that is switched on;
/// APEX_MUTANT_SEEN names a file to record one byte per mutant, set when it is reached.

namespace apex_mutant {

struct Switch {
  int active = -1;
  unsigned char* seen = nullptr;
  long size = 0;

  Switch() {
    if (const char* number = std::getenv("APEX_MUTANT")) active = std::atoi(number);
    const char* path = std::getenv("APEX_MUTANT_SEEN");
    const int file = path ? open(path, O_RDWR) : -1;
    if (file < 0) return;
    struct stat status{};
    if (fstat(file, &status) == 0 && status.st_size > 0) {
      void* memory = mmap(nullptr, status.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
      if (memory != MAP_FAILED) {
        seen = static_cast<unsigned char*>(memory);
        size = status.st_size;
      }
    }
    close(file);
  }
};

inline Switch the_switch;

inline bool on(int number) {
  if (the_switch.seen) __atomic_store_n(the_switch.seen + number, 1, __ATOMIC_RELAXED);
  return number == the_switch.active;
}

}  // namespace apex_mutant
