-- ARGV: episode, fence … Extends what is still owned; returns the episodes that are not.
local lost, expiry = {}, now_ms() + metan('lease_ttl_ms')
for i = 1, #ARGV, 2 do
  if owned(ARGV[i], ARGV[i + 1]) then
    redis.call('ZADD', P .. ':leases', expiry, ARGV[i])
  else
    lost[#lost + 1] = ARGV[i]
  end
end
return lost
