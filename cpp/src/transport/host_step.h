// SPDX-License-Identifier: BSD-3-Clause
#pragma once

// Named points of a protocol between processes of one host. Tests define the macro to kill or stop
// a process at each of them.
#ifndef APEX_HOST_STEP
#define APEX_HOST_STEP(name) ((void)0)
#endif
