// SPDX-License-Identifier: BSD-3-Clause
#pragma once

// The steps of a protocol between processes of one host, named where they have been done: tests
// define what happens there, to end or stop a process at each.
#ifndef APEX_HOST_STEP
#define APEX_HOST_STEP(name) ((void)0)
#endif
