// The winner of an exponential race among the survivors of a row's filters.
#pragma once

#include "../race.h"
#include "choose.h"

namespace outrider {

// The id with the least noise over weight; of equals the lowest. Some weight is more than 0.
i64 raced(const Survivors& survivors, const RaceKey& key);

}  // namespace outrider
