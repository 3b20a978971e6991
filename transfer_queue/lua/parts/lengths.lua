-- Response lengths of finished training episodes, and of those that were over-age, in buckets of a twelfth of an octave.
local function count_length(tokens, over_age)
  local bucket = math.floor(12 * math.log(tokens + 1) / math.log(2) + 1e-9)
  call('HINCRBY', key('lengths'), (over_age and 'over ' or 'all ') .. bucket, 1)
end
