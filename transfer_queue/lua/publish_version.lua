-- ARGV: version, packed manifest. Returns 1 published, 0 known already, -1 its step was never leased or a gap.
local version, current = tonumber(ARGV[1]), metan('version')
if version <= current then return 0 end
if version > current + 1 or metan('next_step') < version then return -1 end
local groups = redis.call('LRANGE', P .. ':step:' .. (version - 1), 0, -1)
for _, group in ipairs(groups) do
  for _, name in ipairs(members(group)) do
    if redis.call('HGET', episode_key(name), 'state') == 'completed' then bump('trained', 1) end
  end
end
bump('groups_shipped', -#groups)
bump('groups_trained', #groups)
redis.call('HSET', META, 'version', version, 'manifest', ARGV[2])
return 1
