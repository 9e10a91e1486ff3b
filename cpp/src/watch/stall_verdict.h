// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Who holds everybody up, in words. Pure.

#include <cstdint>
#include <map>
#include <string>

#include "watch/rank_status.h"

namespace apex::parallel {

/// What a rank tells of itself when ranks of a group wait for long.
struct Whereabouts {
  std::string group;                       ///< whose collective it waits in, or was in last
  int64_t call = 0;                        ///< the number of that, in the group
  std::string what;                        ///< and its name; empty: there was none
  bool waits = false;                      ///< it waits in it
  double seconds = 0;                      ///< for so long, or so long ago it began
  int64_t asked = 0;                       ///< how often ranks had asked when it posted this
  std::map<std::string, int64_t> reached;  ///< its last call in each group that shares the board
  std::string state;                       ///< lines: what else is known of the process

  std::string encode() const;
  static Whereabouts decode(const std::string& text);
};

/// A stall, as the rank sees it that reports it.
struct Stall {
  int rank = 0;
  int size = 1;
  Whereabouts mine;
  std::map<int, Whereabouts> others;  ///< as they have posted last
  Proof processes;                    ///< of this host, that have ended or are stopped
  bool store_answers = true;
  bool on_device = false;   ///< a GPU waits, and the host of this rank goes on
  double seconds_left = 0;  ///< until the group's timeout; negative if that is not known
  std::string note;         ///< which ranks of the job these are; may be empty
};

/// Whether there is something to say. A GPU that is busy looks as if it waited for others: that is
/// so only if a host has not made the call yet.
bool is_stall(const Stall& stall);

/// Lines: who is late, where it is, why that may be, what to do.
std::string describe(const Stall& stall);

/// Who is late, and in which collective or before which gradient: equal until that changes.
std::string signature(const Stall& stall);

/// What ranks have printed last, where all of them read it.
struct Said {
  int64_t times = 0;      ///< a rank has begun to print
  int rank = 0;           ///< which one; two may begin at once
  std::string group;      ///< about whose call the last verdict is
  int64_t call = 0;       ///< and about which; 0 where ranks wait in several
  std::string signature;  ///< of that
  std::string verdict;    ///< and its text; empty while a rank begins

  std::string encode() const;
  static Said decode(const std::string& text);
};

}  // namespace apex::parallel
