-- ARGV: limits and config as field, value … A run that exists must have the same limits; its config is replaced.
local wanted = {}
for i = 1, #ARGV, 2 do wanted[ARGV[i]] = ARGV[i + 1] end
if redis.call('EXISTS', META) == 1 then
  for field, value in pairs(wanted) do
    if field ~= 'config' and meta(field) ~= value then return {field, meta(field)} end
  end
end
for field, value in pairs(wanted) do redis.call('HSET', META, field, value) end
return {}
