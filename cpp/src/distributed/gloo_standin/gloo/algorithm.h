// SPDX-License-Identifier: BSD-3-Clause
// Stand-in, see gloo.cpp.
#pragma once
