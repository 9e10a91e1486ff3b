// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// The text of a stall verdict: which rank the others wait for. Pure.

#include <cstdint>
#include <map>
#include <string>

#include "watch/rank_status.h"

namespace apex::parallel {

/// A rank's answer when ranks of a group wait for long.
struct Whereabouts {
  std::string group;                       ///< the group in whose collective it waits, or was last
  int64_t call = 0;                        ///< number of that call in the group
  std::string what;                        ///< name of that call; empty: none yet
  bool waits = false;                      ///< whether it is still waiting in it
  double seconds = 0;                      ///< time since the wait, or the call, began
  int64_t asked = 0;                       ///< how often ranks had asked when it posted this
  std::map<std::string, int64_t> reached;  ///< its last call in each group that shares the board
  std::string state;                       ///< further lines about the process

  std::string encode() const;
  static Whereabouts decode(const std::string& text);
};

/// A stall, as seen by the rank that reports it.
struct Stall {
  int rank = 0;
  int size = 1;
  Whereabouts mine;
  std::map<int, Whereabouts> others;  ///< their latest posts
  Proof processes;                    ///< processes of this host that have exited or are stopped
  bool store_answers = true;
  bool on_device = false;   ///< a GPU waits while this rank's host continues
  double seconds_left = 0;  ///< until the group's timeout; negative: unknown
  std::string note;         ///< which ranks of the job these are; may be empty
};

/// Whether to report a stall. A busy GPU looks like a waiting one, so a GPU is stalled only if some
/// host has not made the call yet.
bool is_stall(const Stall& stall);

/// The verdict as lines: which rank is late, where it is, the likely cause, and the remedy.
std::string describe(const Stall& stall);

/// Identifies the late ranks and their collective or gradient. Equal until these change.
std::string signature(const Stall& stall);

/// The last printed verdict, stored where all ranks read it.
struct Said {
  int64_t times = 0;      ///< how often a rank has started to print
  int rank = 0;           ///< the rank that printed; two may start concurrently
  std::string group;      ///< the group whose call the verdict is about
  int64_t call = 0;       ///< number of that call; 0 if ranks wait in several calls
  std::string signature;  ///< signature of the stall
  std::string verdict;    ///< text of the verdict; empty while a rank prints

  std::string encode() const;
  static Said decode(const std::string& text);
};

}  // namespace apex::parallel
