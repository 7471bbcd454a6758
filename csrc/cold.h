// Included first by sources of which nothing is hot (loading, registration, a round's bookkeeping): the compiler takes half as long
// for them. No bit depends on it, as nothing is fused or reordered at any level.
#pragma once
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O1")
#endif
