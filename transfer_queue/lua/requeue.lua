-- ARGV: episode. Its dead group is queued again as it was submitted. Returns 1 | {error}.
local name = ARGV[1]
if redis.call('HEXISTS', P .. ':dead', name) == 0 then return {'no such dead letter'} end
local e = fields(episode_key(name))
if e.lane ~= 'train' then
  redis.call('HDEL', P .. ':dead', name)
  redis.call('DEL', P .. ':deadjournal:' .. name)
  redis.call('HSET', episode_key(name), 'state', 'queued', 'attempt', 0)
  redis.call('ZADD', P .. ':lane:' .. e.lane, e.order, name)
  return 1
end
local g = fields(group_key(e.task))
if g.state ~= 'dead' then return {'its group went on without it and is ' .. (g.state or 'gone')} end
for _, member in ipairs(members(e.task)) do
  redis.call('HDEL', P .. ':dead', member)
  redis.call('DEL', episode_key(member), journal_key(member), P .. ':deadjournal:' .. member)
end
redis.call('HSET', group_key(e.task), 'state', 'queued')
redis.call('ZADD', P .. ':queue', g.order, e.task)
bump('groups_dead', -1)
return 1
