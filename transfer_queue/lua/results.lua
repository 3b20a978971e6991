-- ARGV: lane. Returns {finished as name\0fence …, how many are still out}.
local lane, done = ARGV[1], {}
for i, name in ipairs(redis.call('LRANGE', P .. ':results:' .. lane, 0, -1)) do
  done[i] = name .. '\0' .. redis.call('HGET', episode_key(name), 'fence')
end
local leased = tonumber(redis.call('HGET', P .. ':out:' .. lane, 'leased') or 0)
return {done, redis.call('ZCARD', P .. ':lane:' .. lane) + leased}
