-- needs: server
-- ARGV: config, then limit name, value, … Returns nothing, or the first limit that differs: name, theirs, ours.
local RUN = KEYS[1] .. 'run'
local exists = redis.call('EXISTS', RUN) == 1
for i = 2, #ARGV, 2 do
  local found = redis.call('HGET', RUN, ARGV[i])
  if exists and found ~= ARGV[i + 1] then
    return {ARGV[i], found or 'nothing', ARGV[i + 1]}
  end
end
for i = 2, #ARGV, 2 do redis.call('HSET', RUN, ARGV[i], ARGV[i + 1]) end
redis.call('HSET', RUN, 'config', ARGV[1])
redis.call('HSETNX', KEYS[1] .. 'counters', 'server', server_start())
return {}
