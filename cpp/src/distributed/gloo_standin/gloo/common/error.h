#pragma once

// Stand-in, see gloo.cpp. Nothing of this header is used.
